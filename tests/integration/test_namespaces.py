"""Trainers of ``pytorch_lightning`` take the callback as those of ``lightning.pytorch`` do."""

from pathlib import Path

import one_namespace
import pytest
import pytorch_lightning
import torch
from forks import forked
from reference import Samples, cut, fit, flat_gradient, loss, network, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate


class LegacyRegression(pytorch_lightning.LightningModule):
    """The reference task in the other namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        value = loss(self.net, batch[0], batch[1])
        self.log("loss", value)
        return value

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(flat_gradient(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("arguments", [{"micro_batch_size": 3}, {"memory_budget": 3000}])
def test_the_other_namespace_trains_the_same(arguments: dict[str, object]) -> None:
    """Probe included; nothing is left of it for a fit of this namespace in the same process."""
    callback = AutoAccumulate(16, **arguments)
    module = LegacyRegression()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pytorch_lightning.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(Samples(40), batch_size=8))
    assert callback.plan.factor > 1
    after, _ = fit(DataLoader(Samples(40), batch_size=16), AutoAccumulate(micro_batch_size=3), max_epochs=1)
    for gradients in (module.gradients, after.gradients):
        assert worst_error(gradients, plain_loop(Samples(40), cut(range(40), 16))) <= 1e-12


def test_the_older_namespace_need_not_be_installed(tmp_path: Path) -> None:
    done = forked(one_namespace.main, folder=tmp_path)
    assert done.code == 0, done.output
