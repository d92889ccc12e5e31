"""``LIGHTNING_GA=1``: the callback in every Trainer, by the entry points that the wheel declares."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, everywhere
from lightning_ga.counters import TargetTokens

GROUPS = {
    "lightning.pytorch.callbacks_factory": "lightning.fabric.utilities.registry",
    "pytorch_lightning.callbacks_factory": "lightning_fabric.utilities.registry",
}


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The entry points of pyproject.toml, as an installed wheel has them."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, dict[str, str]] = project["entry-points"]

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in found.get(group, {}).items()]

    for registry in GROUPS.values():
        monkeypatch.setattr(f"{registry}.entry_points", entry_points)
    everywhere.say.cache_clear()
    return found


def trained(lightning: ModuleType, folder: Path, *callbacks: object, **arguments: object) -> object:
    """A Trainer of this namespace after an epoch of 64 samples in batches of 16."""

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[*callbacks],
        default_root_dir=folder,
        **quiet | {"enable_checkpointing": False, **arguments},
    )
    trainer.fit(Line(), DataLoader(torch.ones(64, 4), batch_size=16))
    return trainer


@pytest.mark.parametrize("lightning", [pl, pytorch_lightning], ids=["lightning.pytorch", "pytorch_lightning"])
def test_every_trainer_has_the_callback(declared, lightning, tmp_path, monkeypatch, capsys):
    """With the arguments of the variable, and with the state in checkpoints that the callback itself has."""
    assert declared.keys() == GROUPS.keys()
    monkeypatch.setenv("LIGHTNING_GA", "effective_batch_size=32 verify=False cache=False")
    trainer = trained(lightning, tmp_path, enable_checkpointing=True)
    (own,) = [one for one in trainer.callbacks if isinstance(one, AutoAccumulate)]
    assert (trainer.global_step, own.plan.effective_batch_size) == (2, 32)
    (file,) = tmp_path.rglob("*.ckpt")
    assert "AutoAccumulate" in torch.load(file, weights_only=True)["callbacks"]


def test_a_script_that_has_the_callback_keeps_its_own(declared, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GA", "1")
    own = AutoAccumulate(8, verify=False, cache=False)
    trainer = trained(pl, tmp_path, own)
    assert [one for one in trainer.callbacks if isinstance(one, AutoAccumulate)] == [own]
    assert trainer.global_step == 8


def test_one_line_says_so(declared, tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("LIGHTNING_GA", "memory_budget=10GiB")
    monkeypatch.setattr(everywhere, "rank_zero_info", said.append)
    for _ in range(2):
        pl.Trainer(logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    sentence = "AutoAccumulate(memory_budget='10GiB') is in every Trainer of this process."
    assert said == [f"LIGHTNING_GA=memory_budget=10GiB: {sentence}"]


def test_arguments_are_read():
    read = everywhere.read("LIGHTNING_GA", "normalize=TargetTokens whole=('encoder',) on_oom=raise")
    assert read == {"normalize": TargetTokens(), "whole": ("encoder",), "on_oom": "raise"}
    assert everywhere.read("LIGHTNING_GA", "1") == {}
    assert everywhere.read("LIGHTNING_GA", "normalize=count_items") == {"normalize": "count_items"}  # refused as a text
    for wrong in ("true", "memory=1GiB", "verify="):
        with pytest.raises(UserError, match="is no ARGUMENT=VALUE of AutoAccumulate, which has effective_batch_size"):
            everywhere.read("LIGHTNING_GA", wrong)


def test_without_the_variable_nothing_is_imported():
    """Nor with 0: the entry point itself needs the standard library alone."""
    code = "import sys; from lightning_ga.environment import callbacks; print(callbacks(), 'torch' in sys.modules)"
    for value in ("", "0"):
        line = [sys.executable, "-c", code]
        run = subprocess.run(
            line, env={"LIGHTNING_GA": value, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
        )
        assert run.stdout == "[] False\n", run.stderr
