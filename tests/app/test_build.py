"""What cannot work, found once it is built and before it starts."""

import lightning.pytorch as pl
import pytest

from lightning_ga import UserError
from lightning_ga.app import build


def test_many_more_processes_than_cores_are_refused(monkeypatch):
    """A few are for trying ranks out."""
    monkeypatch.setattr(build.os, "cpu_count", lambda: 2)
    quiet = {"logger": False, "enable_checkpointing": False}
    for devices in (1, 2, 8):
        build.check_cpu(pl.Trainer(accelerator="cpu", strategy="ddp", devices=devices, **quiet), "32-true")
    with pytest.raises(
        UserError, match=r"devices=99 would start as many processes on the 2 cores here: use trainer.devices=2"
    ):
        build.check_cpu(pl.Trainer(accelerator="cpu", strategy="ddp", devices=99, **quiet), "32-true")
