"""What a first look does not show is found all the same: rare samples, small micro-batches, state that nobody sees."""

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from true_support import Case, Task, each_way, network, pairs, run, train

from lightning_ga import AutoAccumulate, UserError


class Mined(Task):
    """A mean over samples above the batch's mean loss."""

    def loss(self, batch: Any) -> torch.Tensor:
        losses = (self.predict(batch[0]) - batch[1]).square().flatten()
        return losses[losses >= losses.detach().mean()].mean()


class Correlated(Task):
    """Standardized over the batch by hand: of one sample that is no number."""

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        return mse_loss((predicted - predicted.mean()) / predicted.std(), batch[1])


class Dropped(Task):
    """A weight of the loss, by a name that begins as those of dropout."""

    drop_weight = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.drop_weight = 0.5

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        return mse_loss(predicted, batch[1]) + self.drop_weight * (predicted - predicted.T).square().mean()


@pytest.mark.parametrize(
    ("module", "micro_batch_size"), [(Mined, 1), (Mined, 2), (Mined, 3), (Correlated, 4), (Dropped, 4)]
)
def test_coupled_samples_are_told(module: Any, micro_batch_size: int) -> None:
    """Small micro-batches are measured on more samples; a part may have no gradient; only dropout is switched off."""
    loader = DataLoader(pairs(36), batch_size=12)
    ours = train(module(), loader, AutoAccumulate(micro_batch_size=micro_batch_size))
    assert ours.cause == "coupled" or (ours.cause == "weighted" and module is Mined)
    assert len(ours.told) == 1


class Carried(Task):
    """A state that is carried from step to step, and begins anew where the batch has another size."""

    carried: torch.Tensor | None = None

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = torch.tanh(self.predict(batch[0]))
        before = (
            self.carried if self.carried is not None and len(self.carried) == len(hidden) else 0.0 * hidden.detach()
        )
        self.carried = hidden.detach()
        return mse_loss(hidden + 0.3 * before, batch[1])


class Hidden(Task):
    """A teacher that is no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [network()]

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.net.parameters()):
                slow.lerp_(fast, 0.001)
            wanted = self.teacher[0](batch[0])
        return mse_loss(self.predict(batch[0]), wanted + batch[1])


@pytest.mark.parametrize("module", [Carried, Hidden])
@each_way
def test_state_that_nobody_sees_shows_in_a_step_that_is_repeated(module: Any, way: Any) -> None:
    """The same batch has another gradient then. After an error, the run ends if weights have no copy."""
    if way.fails and module is Hidden:
        with pytest.raises(UserError, match=r"of which no copies are made \(teacher.0.0.weight\)"):
            run(Case(module, lambda: DataLoader(pairs(36), batch_size=12), 12, 4), way)
        return
    ours = run(Case(module, lambda: DataLoader(pairs(36), batch_size=12), 12, 4), way)
    assert ours.cause == "stateful"
    assert len(ours.told) == (0 if way.fails else 1)
    assert "same result" not in " ".join(ours.ran_out)


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
def test_autocast_is_not_taken_for_coupling(micro_batching: str) -> None:
    module = Task().float()
    samples = [(x.float(), y.float()) for x, y in pairs(24)]
    callback = AutoAccumulate(micro_batch_size=3, micro_batching=micro_batching)
    ours = train(module, DataLoader(samples, batch_size=8), callback, precision="bf16-mixed")
    assert (ours.cause, ours.told) == ("exact", [])
