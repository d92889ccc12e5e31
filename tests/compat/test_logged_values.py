"""One logged value an optimizer step: the oracle is stock Lightning, which trains on whole windows in one pass."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from ranks import ddp, on_ranks
from reference import Samples, network, quiet_trainer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, Metric
from torchmetrics.regression import MeanSquaredError

from lightning_ga import AutoAccumulate
from lightning_ga.testing import out_of_memory_at

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
EFFECTIVE = 14  # in micro-batches of 5: 5 + 5 + 4
SAMPLES = 70
RAGGED = 66  # samples of an epoch whose last window has 10
Rows = list[tuple[int | None, dict[str, float]]]


class KeepRows(DummyLogger):
    """Keeps what is logged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Rows = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if "oom_events" not in metrics:
            self.rows.append((step, {name: float(value) for name, value in metrics.items()}))


class Collected(Metric):
    """Needs its whole state in each update, and keeps predictions."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.values.append(values.flatten())

    def compute(self) -> torch.Tensor:
        return torch.cat(list(self.values)).median()


class Logging(pl.LightningModule):
    """Logs values of all kinds, each of which a whole window has in one pass, too.

    Args:
        fails: The call of the step at which memory runs out; 0 is never.
        by_tokens: Whether the loss is a mean over tokens: sample i has 1 + i mod 3 of them.
    """

    def __init__(self, *, fails: int = 0, by_tokens: bool = False, sync_dist: bool = False) -> None:
        super().__init__()
        self.net = network()
        self.squares = MeanSquaredError().set_dtype(torch.float64)
        self.median = Collected()
        self.most = MaxMetric().set_dtype(torch.float64)
        self.fails = fails
        self.by_tokens = by_tokens
        self.sync_dist = sync_dist
        self.calls = 0
        self.seen: list[dict[str, float]] = []  # what callbacks and the bar see, at the end of each window

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, numbers = batch
        self.calls += 1
        predicted = self.net(inputs)
        weights = (1.0 + numbers % 3)[:, None].double() if self.by_tokens else torch.ones_like(targets)
        loss = (weights * (predicted - targets) ** 2).sum() / weights.sum()
        errors = (predicted - targets).detach().abs()
        shared = {"sync_dist": self.sync_dist}
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, **shared)
        self.log("step", loss.detach() * 2, on_step=True, on_epoch=False, **shared)
        self.log("sum", errors.sum(), on_step=True, on_epoch=True, reduce_fx="sum", **shared)
        self.log("max", errors.max(), on_step=True, reduce_fx=torch.max, **shared)
        self.log_dict({"min": errors.min(), "constant": 3.0}, on_step=True, reduce_fx="min", **shared)
        self.log("counted", loss.detach(), on_step=True, batch_size=int(weights.sum()), **shared)
        self.log("as in the loader", loss.detach(), on_step=True, batch_size=torch.tensor(EFFECTIVE), **shared)
        self.log("by epoch", errors.mean())
        if self.calls == self.fails:
            with out_of_memory_at(1):
                torch.zeros(1)
        if not self.sync_dist:
            self.squares(predicted.detach(), targets)
            self.most(predicted.detach())
            self.log("squares", self.squares, on_step=True, on_epoch=True)
            self.log("most", self.most, on_step=True, on_epoch=True)
            self.median(predicted.detach())
            self.log("median", self.median, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", batch[2].double().mean(), on_step=True)
        if not self.trainer.fit_loop._should_accumulate():
            shown = {**self.trainer.callback_metrics, **self.trainer.progress_bar_metrics}
            self.seen.append({name: float(value) for name, value in shown.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


def tokens(batch: Any) -> int:
    """What ``Logging(by_tokens=True)`` has its mean over."""
    return int((1 + batch[2] % 3).sum())


def train_logged(
    *callbacks: pl.Callback, batch: int = EFFECTIVE, samples: int = SAMPLES, module: Any = None, **settings: Any
) -> tuple[Rows, list[dict[str, float]], dict[str, float]]:
    """Train and return rows, what callbacks saw, and what is left in the end."""
    module = Logging() if module is None else module
    logger = KeepRows()
    trainer = quiet_trainer(*callbacks, logger=logger, **{"log_every_n_steps": 1, **settings})
    trainer.fit(module, DataLoader(Samples(samples), batch_size=batch))
    return logger.rows, module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_same(ours: Any, stock: Any) -> None:
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def ours(micro_batch: int, mode: str = "loader", **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=False, **settings)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("micro_batch", [1, 5, 12])
@pytest.mark.parametrize("samples", [SAMPLES, RAGGED])
def test_a_logged_value_is_that_of_the_window(micro_batch: int, mode: str, samples: int) -> None:
    """In every row, in the bar, for callbacks, and in the end, whatever the micro-batch; epochs stay as they were."""
    assert_same(train_logged(ours(micro_batch, mode), samples=samples), train_logged(samples=samples))


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("batch", [7, 3])
def test_batches_that_the_recipe_accumulates_are_a_window(batch: int, mode: str) -> None:
    """Stock Lightning logs the last of them alone."""
    factor = -(-EFFECTIVE // batch)
    stock = train_logged(batch=batch * factor)
    assert_same(train_logged(ours(5, mode), batch=batch, accumulate_grad_batches=factor), stock)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("call", [1, 2, 8, 9, 20])
def test_a_window_that_runs_again_leaves_no_value_of_its_failed_passes(call: int, mode: str) -> None:
    callback = ours(12, mode)
    assert_same(train_logged(callback, module=Logging(fails=call)), train_logged())
    assert callback.oom_events == 1


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_means_are_weighted_by_what_normalize_counts(mode: str) -> None:
    rows = train_logged(ours(5, mode, normalize=tokens), module=Logging(by_tokens=True))[0]
    for (_, one), (_, other) in zip(rows, train_logged(module=Logging(by_tokens=True))[0], strict=True):
        for name in {"loss_step", "step", "sum_step", "counted_step", "squares_step"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-12)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_rows_are_written_as_often_as_was_asked(mode: str) -> None:
    stock = train_logged(log_every_n_steps=3)
    assert_same(train_logged(ours(5, mode), log_every_n_steps=3), stock)


class Odd(MeanMetric):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a metric that holds a lock")


class Some(Logging):
    """Logs a value in some batches only, and metrics of which no copy can be updated by itself; notes each value."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = MeanMetric() * 2
        self.odd = Odd()
        self.values: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        predicted = self.net(batch[0])
        value = predicted.detach().mean().float()
        self.values.append((float(value), float(self.odd(value)), float(self.doubled(value))))
        if batch_idx % 3 == 1:
            self.log("second", value, on_step=True, on_epoch=False)
        self.log("odd", self.odd, on_step=True, on_epoch=False)
        self.log("doubled", self.doubled, on_step=True, on_epoch=False)
        return mse_loss(predicted, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log nothing here."""


def test_what_some_micro_batches_log_and_what_cannot_be_merged() -> None:
    """A value of one micro-batch is the window's; a metric that cannot be copied gives the last micro-batch's."""
    module = Some()
    rows = train_logged(ours(5), module=module)[0]
    found = [(row["second"], row["odd"], row["doubled"]) for _, row in rows]
    windows = zip(module.values[::3], module.values[1::3], module.values[2::3])
    assert found == [(second[0], last[1], last[2]) for _, second, last in windows]


class LoggedFirst(Some):
    """Logs a value, over ranks, in the first micro-batch of each window; it is validated after every second window."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        if batch_idx % 2 == 0:
            self.log("first", batch[2].double().mean(), on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only the end of its batch matters."""


def validated_on_rank() -> Rows:
    """Train on two ranks in windows of two micro-batches of two samples each, in four windows."""
    logger, data = KeepRows(), DataLoader(Samples(32), 4)
    settings = {"max_epochs": 1, "val_check_interval": 2, "logger": logger, "log_every_n_steps": 1, **ddp()}
    trainer = quiet_trainer(AutoAccumulate(micro_batch_size=2, verify=False), **settings)
    trainer.fit(LoggedFirst(), data, DataLoader(Samples(2), 1))
    return [row for row in logger.rows if "first" in row[1]]


@pytest.mark.distributed
def test_validation_does_not_exchange_the_values_of_the_window_before_it(tmp_path: Path) -> None:
    """That a window's last micro-batch has not logged them is no reason to exchange them again."""
    rows, _ = on_ranks(validated_on_rank, tmp_path)
    assert len(rows) == 4


def on_rank(micro_batch: int, mode: str, fails: int) -> Any:
    """Train on two ranks, in six windows of 7 + 6 samples if the loader cuts, and of 7 + 7 in the step."""
    module = Logging(sync_dist=True, fails=fails if os.environ["RANK"] == "1" else 0)
    callback = ours(micro_batch, mode, effective_batch_size=13 if mode == "loader" else None)
    return *train_logged(callback, batch=7, samples=78, module=module, **ddp()), callback.oom_events


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_ranks_exchange_the_values_of_windows(mode: str, tmp_path: Path) -> None:
    """As often as asked, once a window; also if a rank alone has run a window again."""
    whole = on_ranks(on_rank, tmp_path / "whole", 7, mode, 0)
    for micro_batch, fails in ((4, 0), (4, 1), (7, 1), (7, 2), (4, 6)):
        cut = on_ranks(on_rank, tmp_path / f"{micro_batch}.{fails}", micro_batch, mode, fails)
        for one, other in zip(cut, whole):
            assert_same(one[:3], other[:3])
        assert [each[3] for each in cut] == [0, int(fails > 0)]


class Numbered(Logging):
    """Logs the mean of the numbers of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[list[float]] = [[]]  # of this rank's samples, by window

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.numbers[-1] += batch[2].tolist()
        self.log("number", batch[2].double().mean(), on_step=True, sync_dist=True)
        return mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.numbers.append([])


def numbers_on_rank(mode: str) -> Any:
    """Train in windows of 5 + 4 samples if the loader cuts, else with what a stream gives: 5 and 2."""
    module = Numbered()
    callback = ours(2, mode, effective_batch_size=9 if mode == "loader" else None)
    batch = 5 if mode == "loader" or os.environ["RANK"] == "0" else 2
    rows, *_ = train_logged(callback, batch=batch, samples=45, module=module, max_steps=4, **ddp())
    return [row["number"] for _, row in rows], module.numbers


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_mean_over_ranks_is_that_of_their_samples(mode: str, tmp_path: Path) -> None:
    one, other = on_ranks(numbers_on_rank, tmp_path, mode)
    of_windows = [[*mine, *others] for mine, others in zip(one[1], other[1])][:4]
    assert len({*map(len, one[1][:4]), *map(len, other[1][:4])}) > 1
    assert one[0] == other[0] == pytest.approx([sum(window) / len(window) for window in of_windows], rel=1e-12)


class Labelled(Numbered):
    """The mean over samples with a label: NaN on a rank that has none."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, numbers = batch
        self.numbers[-1] += [number for number in numbers.tolist() if is_labelled(number)]
        labelled = is_labelled(numbers)
        self.log("number", numbers[labelled].double().mean(), on_step=True, sync_dist=True)
        return (self.net(inputs) - targets)[labelled].square().mean()


def is_labelled(number: Any) -> Any:
    return number % 3 > 0


def labels(batch: Any) -> int:
    return int(is_labelled(batch[2]).sum())


def labelled_on_rank() -> Any:
    """Train in windows of four samples, two a rank."""
    module = Labelled()
    callback = ours(1, effective_batch_size=4, normalize=labels)
    rows, *_ = train_logged(callback, batch=2, samples=40, module=module, **ddp())
    return [row["number"] for _, row in rows], module.numbers[:-1]


@pytest.mark.distributed
def test_a_rank_without_items_adds_nothing_to_a_mean_over_ranks(tmp_path: Path) -> None:
    one, other = on_ranks(labelled_on_rank, tmp_path)
    of_windows = [[*mine, *others] for mine, others in zip(one[1], other[1], strict=True)]
    assert [] in one[1] + other[1]
    assert one[0] == other[0] == pytest.approx([sum(window) / len(window) for window in of_windows], rel=1e-12)


class Epochs(Logging):
    """Logs the mean number of its samples for the epoch, with a ``batch_size`` of its own."""

    def __init__(self, size_of: Any) -> None:
        super().__init__()
        self.size_of = size_of

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, *_ = batch if isinstance(batch[0], list) else (batch, None)
        self.log("number", first[2].double().mean(), on_epoch=True, batch_size=self.size_of(batch))
        return mse_loss(self.net(first[0]), first[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log nothing here."""


class Evaluated(Epochs):
    """Memory runs out in validation with more than two samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.log("number of validation", batch[2].double().mean(), batch_size=self.size_of(batch))


@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize("micro_batch", [2, 3])
def test_a_constant_batch_size_is_one_in_the_smaller_last_batch_too(micro_batch: int) -> None:
    """Batches of 8, 8 and 4 samples: Lightning weighs each as 8."""
    module = Evaluated(lambda _: 8)
    trainer = quiet_trainer(ours(micro_batch, "step"), max_epochs=1)
    trainer.fit(module, DataLoader(Samples(20), batch_size=8), DataLoader(Samples(20), batch_size=8))
    expected = sum([3.5, 11.5, 17.5]) / 3
    assert float(trainer.callback_metrics["number_epoch"]) == pytest.approx(expected)
    assert float(trainer.callback_metrics["number of validation"]) == pytest.approx(expected)


def test_samples_of_several_loaders_are_counted() -> None:
    """A ``batch_size`` that is counted in the larger batch, of 8 beside 4 samples, and at the end beside 2."""
    loaders = [DataLoader(Samples(24), batch_size=8), DataLoader(Samples(10), batch_size=4)]
    found = []
    for callbacks in ([], [ours(2, "step")]):
        trainer = quiet_trainer(*callbacks, max_epochs=1)
        trainer.fit(Epochs(lambda batch: len(batch[0][0])), CombinedLoader(loaders, "min_size"))
        found.append(float(trainer.callback_metrics["number_epoch"]))
    assert found[1] == pytest.approx(found[0])
