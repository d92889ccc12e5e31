"""Memory runs out in a batch that runs in pieces: at which operation is not to be seen afterwards, to the bit."""

from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.testing import OperationCounter, out_of_memory_at

SAMPLES, MICRO, BATCHES = 12, 4, 6  # three pieces a batch
pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")


class Stateful(pl.LightningModule):
    """Draws random numbers, moves statistics, gathers outputs, and counts in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.gathered: list[torch.Tensor] = []
        self.mean = torchmetrics.MeanMetric()
        self.totals: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.total, self.largest = 0.0, None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.totals += [self.total, self.largest]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        output = self.net(inputs)
        self.gathered.append(output.detach().mean())
        self.mean(output.detach())
        self.total += output.detach().sum()
        self.largest = output.detach().max() if self.largest is None else self.largest.maximum(output.detach().max())
        loss = output.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class FailOnce(pl.Callback):
    """Lets memory run out at one operation of a batch: from its first forward pass to its last backward pass."""

    def __init__(self, batch: int, operation: int) -> None:
        self.batch, self.operation = batch, operation
        self.counter: OperationCounter | None = None
        self.before: list[int] = []  # operations before the backward pass of each piece
        self.after: list[int] = []  # and after it

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].register_forward_pre_hook(lambda *_: self._begin(trainer))
        backward = pl_module.backward

        def and_count(*arguments: Any, **settings: Any) -> None:
            backward(*arguments, **settings)
            self.after_backward()

        pl_module.backward = and_count

    def _begin(self, trainer: Any) -> None:
        if self.counter is None and trainer.fit_loop.batch_idx == self.batch:
            self.counter = out_of_memory_at(self.operation)
            self.counter.__enter__()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self.counter is not None:
            self.before.append(self.counter.operations)

    def after_backward(self) -> None:
        """Go on until the last piece has been through."""
        if self.counter is not None:
            self.after.append(self.counter.operations)
            if len(self.after) == SAMPLES // MICRO:
                self.counter.__exit__(None, None, None)


def trainer(ours: AutoAccumulate, *callbacks: pl.Callback, factor: int = 1) -> pl.Trainer:
    return quiet_trainer(ours, *callbacks, max_epochs=1, accumulate_grad_batches=factor)


def train(batch: int, operation: int, factor: int) -> tuple[list[Any], FailOnce, AutoAccumulate]:
    """Everything that is left behind by a training in which memory ran out at an operation of a batch."""
    torch.manual_seed(0)
    module, fails = Stateful(), FailOnce(batch, operation)
    data = TensorDataset(torch.randn(SAMPLES * BATCHES, 5))
    ours = AutoAccumulate(micro_batch_size=MICRO, micro_batching="step", batch_norm="ignore", verify=False)
    fitted = trainer(ours, fails, factor=factor)
    fitted.fit(module, DataLoader(data, batch_size=SAMPLES))
    left = [
        *module.state_dict().values(),
        *module.gathered,
        *module.totals,
        module.mean.compute(),
        torch.get_rng_state(),
    ]
    return [*left, fitted.callback_metrics["loss"]], fails, ours


def undisturbed(batch: int, factor: int) -> FailOnce:
    """Counts of the operations of a batch in which memory does not run out."""
    _, counted, ours = train(batch, 0, factor)
    assert ours.oom_events == 0
    return counted


def check(expected: list[Any], batch: int, operation: int, factor: int) -> None:
    """Compare what is left behind where memory runs out at this operation."""
    found, _, ours = train(batch, operation, factor)
    assert ours.oom_events == 1
    assert len(found) == len(expected)
    differing = [place for place, pair in enumerate(zip(found, expected)) if not torch.equal(*pair)]
    assert not differing, f"memory ran out at operation {operation}"


def test_a_batch_that_begins_a_window_is_run_again_from_its_start() -> None:
    expected, _, _ = train(4, 1, factor=1)
    last = undisturbed(4, factor=1).after[SAMPLES // MICRO - 1]
    for operation in range(2, last, 17):
        check(expected, 4, operation, factor=1)


def test_within_a_window_a_piece_is_run_again() -> None:
    counted = undisturbed(5, factor=2)
    first, last = counted.after[0] + 2, counted.before[1]  # a loss is detached after its backward pass
    expected, _, _ = train(5, last, factor=2)
    for operation in [*range(first, first + 12), *range(first + 12, last, 9)]:  # the cut comes first
        check(expected, 5, operation, factor=2)


class Evaluated(Stateful):
    """A validation that draws numbers, and holds three samples; memory runs out at one operation of its last batch."""

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.counter = out_of_memory_at(operation)
        self.operations = 0  # of the last batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (inputs,) = batch
        if len(inputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if batch_idx == BATCHES - 1 and not self.operations:
            self.counter.__enter__()
            self.operations = 1
        output = nn.functional.dropout(self.net(inputs), 0.3)
        self.gathered.append(output.mean())
        self.mean(output)
        self.log("mean", self.mean)
        self.log("square", output.square().mean(), batch_size=len(inputs))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.operations:
            self.operations = self.counter.operations
            self.counter.__exit__(None, None, None)


def validate(operation: int) -> tuple[list[Any], Evaluated, AutoAccumulate]:
    """Everything that is left behind by a validation in which memory ran out at an operation of the last batch."""
    torch.manual_seed(0)
    module, data = Evaluated(operation), TensorDataset(torch.randn(SAMPLES * BATCHES, 5))
    ours = AutoAccumulate()
    evaluating = pl.Trainer(
        accelerator="cpu", callbacks=[ours], logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    (logged,) = evaluating.validate(module, DataLoader(data, batch_size=SAMPLES), verbose=False)
    left = [*module.gathered, torch.get_rng_state()]
    return [*left, *map(torch.tensor, logged.values())], module, ours


def test_a_batch_of_an_evaluation_is_run_again_from_its_start() -> None:
    """What is logged when all pieces have run may run out of memory, too: it is logged again."""
    unchanged, undisturbed, _ = validate(0)
    smaller, _, _ = validate(1)
    left = {1: unchanged, 2: smaller}  # by errors survived, of which the first batch met one
    for operation in range(2, undisturbed.operations, 7):
        found, _, ours = validate(operation)
        assert len(found) == len(left[ours.oom_events])
        assert all(map(torch.equal, found, left[ours.oom_events])), f"memory ran out at operation {operation}"


class Few(nn.Module):
    """Refuses a single sample, as BatchNorm of vectors does; more than two do not fit from some call on."""

    sizes: ClassVar[list[int]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert len(inputs) > 1
        if sum(self.sizes) >= 8 * 4 and len(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes.append(len(inputs))
        return inputs


def test_a_batch_that_is_run_again_is_cut_into_near_equal_pieces() -> None:
    """Three samples halved would be two and one, which BatchNorm refuses, and two passes more."""
    module = Stateful()
    module.net = nn.Sequential(Few(), nn.Linear(5, 1))
    Few.sizes.clear()
    ours = AutoAccumulate(micro_batch_size=3, micro_batching="step", batch_norm="ignore", verify=False)
    trainer(ours).fit(module, DataLoader(TensorDataset(torch.randn(8 * 5, 5)), batch_size=8))
    assert ours.oom_events == 1
    assert Few.sizes[-4:] == [2, 2, 2, 2]


class Words(pl.LightningModule):
    """Its losses are means over the words of a batch, of which samples have different numbers; three samples fit."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits = fits

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values, mask = batch
        if len(values) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = values[mask].mean()
        self.log("loss", loss, batch_size=len(values))
        return loss

    def on_validation_batch_end(self, outputs: torch.Tensor, batch: Any, batch_idx: int) -> None:
        self.log("returned", outputs, batch_size=len(batch[0]))


@pytest.mark.parametrize("counts", [True, False], ids=["", "counter of other batches"])
def test_pieces_of_an_evaluation_weigh_what_normalize_counts(counts: bool) -> None:
    """A counter that is made for other batches than these is left out: then samples weigh."""
    values, lengths = torch.randn(8, 9, dtype=torch.float64), torch.arange(1, 9)
    mask = torch.arange(9) < lengths[:, None]
    loader = DataLoader(TensorDataset(values, mask), batch_size=8)
    normalize = (lambda batch: batch[1].sum()) if counts else (lambda batch: batch["labels"].sum())
    found = [
        quiet_trainer(AutoAccumulate(normalize=normalize)).validate(Words(fits), loader, verbose=False)[0]
        for fits in (8, 3)
    ]
    assert set(found[0]) == {"loss", "returned"}
    assert (found[1] == pytest.approx(found[0], rel=1e-6)) == counts
