"""What the samples before training do not show, training shows later: it is measured again, and told."""

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader
from true_support import (
    FEATURES,
    ROUNDING,
    WAYS,
    Case,
    Memory,
    Task,
    Trained,
    Way,
    each_cut,
    each_way,
    error,
    network,
    one_pass,
    pairs,
    run,
    train,
)

from lightning_ga import AutoAccumulate
from lightning_ga.fit.exactness import later, measure
from lightning_ga.plan.exactness import INEXACT, SAME_RESULT


def loader(samples: int = 48, batch: int = 8) -> Any:
    return DataLoader(pairs(samples), batch_size=batch)


class Late(Task):
    """A term of the variance over the batch that begins after a while."""

    begins: Callable[["Late"], bool]

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        return mse_loss(predicted, batch[1]) + (predicted.var() if type(self).begins(self) else 0.0)


class LateByBatch(Late):
    begins = staticmethod(lambda self: self.trainer.fit_loop.epoch_loop.total_batch_idx >= 4)


class LateByStep(Late):
    begins = staticmethod(lambda self: self.global_step >= 5)


class LateByEpoch(Late):
    begins = staticmethod(lambda self: self.current_epoch > 2)


@pytest.mark.parametrize("kind", [LateByBatch, LateByStep, LateByEpoch])
@each_way
def test_a_term_that_begins_later_is_told_once(kind: type[Late], way: Way) -> None:
    ours = run(Case(kind, loader), way, max_epochs=6)
    assert error(ours, one_pass(Case(kind, loader), max_epochs=6)) > 1e-4
    assert ours.cause == "coupled" or (kind is LateByBatch and ours.cause == "stateful")  # which counts batches
    assert ["Accumulation is not exact for this training" in text for text in ours.told] == [True]


class Unfrozen(Task):
    """BatchNorm is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES).double()

    def on_train_epoch_start(self) -> None:
        self.norm.train(self.current_epoch > 0)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([self.norm(batch[0]), batch[1]])


@pytest.mark.parametrize(("batch_norm", "told"), [("warn", 1), ("ignore", 0)])
@each_way
def test_batch_norm_that_is_trained_later_is_told_then(batch_norm: str, told: int, way: Way) -> None:
    ours = run(Case(Unfrozen, loader), way, max_epochs=3, arguments={"batch_norm": batch_norm})
    assert ours.cause == "batch_norm"
    assert len(ours.told) == told


class Second(Late):
    """The term begins with the second batch, which runs out of memory."""

    begins = staticmethod(lambda self: self.trainer.fit_loop.epoch_loop.total_batch_idx >= 1)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_an_error_in_a_batch_that_couples_is_not_told_as_the_same(mode: str) -> None:
    callback = AutoAccumulate(micro_batch_size=8, micro_batching=mode)
    ours = train(Second(), loader(), callback, memory=Memory(2))
    (event,) = ours.ran_out
    assert "Its gradient is not that of the batch in one pass" in event
    assert SAME_RESULT not in event
    assert ours.cause in INEXACT


def test_measurements_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first window of some epochs and after some steps; in long trainings at most a share of the passes."""
    measured: list[tuple[int, int]] = []
    measured_by = later.LaterChecks._measured

    def noting(self: Any, slices: Any, **settings: Any) -> Any:
        measured.append((self._trainer.current_epoch, self._trainer.global_step))
        return measured_by(self, slices, **settings)

    monkeypatch.setattr(later.LaterChecks, "_measured", noting)
    monkeypatch.setattr(later, "FREE", 10 * later.COST)
    ours = train(Task(), loader(), AutoAccumulate(micro_batch_size=3), max_epochs=14)
    assert measured == [(0, 1), (0, 2), (0, 4), (1, 6), (1, 8), (2, 12), (2, 16), (3, 18), (4, 24), (5, 32)]
    assert error(ours, one_pass(Case(Task, loader), max_epochs=14)) <= ROUNDING


CLASSES = 4


class Labelled(Task):
    """A mean over the targets that are not ignored."""

    def __init__(self) -> None:
        super().__init__(outputs=CLASSES)

    def loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.predict(batch[0]), batch[1], ignore_index=int(self.ignored))


class Ignores100(Labelled):
    ignored = -100


class Ignores255(Labelled):
    ignored = 255


class IgnoresNan(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        seen = ~batch[1].isnan()
        return mse_loss(self.predict(batch[0])[seen], batch[1][seen])


def labelled(ignored: int) -> Any:
    samples = [(x, torch.tensor(number % CLASSES)) for number, (x, _) in enumerate(pairs(96))]
    for number in (41, 58, 77):
        samples[number] = samples[number][0], torch.tensor(ignored)
    return DataLoader(samples, batch_size=8)


def with_missing() -> Any:
    samples = pairs(96)
    for number in (41, 58, 77):
        samples[number] = samples[number][0], torch.full((1,), torch.nan, dtype=torch.float64)
    return DataLoader(samples, batch_size=8)


RARE = {
    "-100": Case(Ignores100, lambda: labelled(-100)),
    "255": Case(Ignores255, lambda: labelled(255)),
    "nan": Case(IgnoresNan, with_missing),
}


@pytest.mark.parametrize("name", RARE)
@each_way
def test_kinds_of_samples_that_come_later_are_measured(name: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the check looks at hold none of them."""
    monkeypatch.setattr(measure, "CONSIDERED", measure.SAMPLES)
    ours = run(RARE[name], way)
    assert error(ours, one_pass(RARE[name])) > 1e-4
    assert ours.cause == "weighted"
    assert any("Accumulation is not exact for this training" in text for text in ours.told)
    if name != "nan":
        counter = "TargetTokens(1)" if name == "-100" else "TargetTokens(1, ignore_index=255)"
        assert any(f"normalize={counter}" in text for text in ours.told)


@pytest.mark.parametrize("places", [(5,), (0, 1), (0, 4), (1, 3, 5, 7)], ids=str)
@each_cut
def test_a_rare_sample_is_found_wherever_it_lies_in_its_batch(places: tuple[int, ...], way: Way) -> None:
    """In any piece, and also where the halves of a piece hold as many."""
    samples = pairs(96)
    for place in places:
        samples[64 + place] = samples[64 + place][0], torch.full((1,), torch.nan, dtype=torch.float64)
    case = Case(IgnoresNan, lambda: DataLoader(samples, batch_size=8), batch=8, micro=4)
    ours = run(case, way)
    if places == (0, 4) or len(places) == 4:  # each piece holds as many
        assert error(ours, one_pass(case)) <= ROUNDING
    else:
        assert error(ours, one_pass(case)) > 1e-4
    assert ours.cause == "weighted"
    assert len(ours.told) == 1


class Weighed(Task):
    """A mean by weights of samples, of which few are not one."""

    def loss(self, batch: Any) -> torch.Tensor:
        errors = (self.predict(batch[0]) - batch[1]).square().mean(1)
        return (errors * batch[2]).sum() / batch[2].sum()


@pytest.mark.parametrize("rare", [(7, 22), (70, 75)], ids=["before training", "later"])
@each_way
def test_rare_weights_of_samples_are_found(rare: tuple[int, ...], way: Way) -> None:
    """Among the samples that are looked at first, and after them."""
    weights = [torch.tensor(0.25 if number in rare else 1.0).double() for number in range(96)]
    samples = [(*pair, weight) for pair, weight in zip(pairs(96), weights, strict=True)]
    case = Case(Weighed, lambda: DataLoader(samples, batch_size=8))
    ours = run(case, way)
    assert error(ours, one_pass(case)) > 1e-4
    assert ours.cause == "weighted"
    assert ours.told or all("Its gradient is not that" in text for text in ours.ran_out)


class Triplets(Task):
    """Hard triplets within a batch; few samples hold none."""

    def __init__(self) -> None:
        super().__init__(outputs=3)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        embedded = self.predict(inputs)
        distances = torch.cdist(embedded, embedded)
        same = (labels[:, None] == labels[None]) & ~torch.eye(len(labels), dtype=torch.bool)
        found = [
            (d[s].max() - d[~s & ~itself].min() + 5.0).relu()
            for d, s, itself in zip(distances, same, torch.eye(len(labels), dtype=torch.bool))
            if s.any()
        ]
        return torch.stack(found).mean() if found else 0.0 * embedded.sum()


def of_many_classes() -> Any:
    """Each class comes again after eight samples."""
    return DataLoader([(x, torch.tensor(number % 8)) for number, (x, _) in enumerate(pairs(64))], batch_size=16)


@each_way
def test_more_samples_are_looked_at_until_there_is_a_gradient(way: Way) -> None:
    ours = run(Case(Triplets, of_many_classes, batch=16, micro=10), way)
    assert error(ours, one_pass(Case(Triplets, of_many_classes, batch=16, micro=10))) > 1e-2
    assert ours.cause in INEXACT
    assert ours.told or all("Its gradient is not that" in text for text in ours.ran_out)


def test_a_gradient_that_is_zero_as_long_as_it_is_looked_for_is_told_as_unknown() -> None:
    ours = run(Case(Triplets, of_many_classes, batch=16, micro=4), WAYS["loader"])
    assert "Whether accumulation is exact for this model is not known" in ours.told[0]


class Averaged(Task):
    """An average that follows in ``on_before_zero_grad``, as ModelEmaV3 of timm is used, for validation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.average = network(FEATURES, 1).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for old, new in zip(self.average.parameters(), self.net.parameters()):
            old.lerp_(new.detach(), 0.1)


@each_way
def test_an_average_that_no_loss_reads_is_no_matter(way: Way) -> None:
    ours = run(Case(Averaged, loader), way, max_epochs=2)
    assert error(ours, one_pass(Case(Averaged, loader), max_epochs=2)) <= ROUNDING
    assert ours.told == []
    assert ours.cause == "exact"
    assert all("hook" not in text and "Its gradient" not in text for text in ours.ran_out)


class Normalized(Task):
    """Normalizes a weight in its step, as prototypes are: a second time changes nothing."""

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            self.net[2].weight.copy_(torch.nn.functional.normalize(self.net[2].weight, dim=1))
        return super().loss(batch)


@each_cut
def test_a_weight_that_is_normalized_again_is_no_matter(way: Way) -> None:
    ours = run(Case(Normalized, loader), way, max_epochs=2)
    assert error(ours, one_pass(Case(Normalized, loader), max_epochs=2)) <= ROUNDING
    assert ours.told == []
    assert ours.cause == "exact"


class Rows(Task):
    """A memory with a row for each sample."""

    rows = 48

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(self.rows, 1, dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets, index = batch
        predicted = self.predict(inputs)
        value = mse_loss(predicted, targets) + mse_loss(predicted, self.memory[index].clone())
        with torch.no_grad():
            self.memory[index] = 0.5 * self.memory[index] + 0.5 * predicted.detach()
        return value


def indexed() -> Any:
    return DataLoader([(x, y, number) for number, (x, y) in enumerate(pairs(48))], batch_size=8)


@each_way
def test_a_memory_of_samples_is_exact(way: Way) -> None:
    ours = run(Case(Rows, indexed), way, max_epochs=3)
    assert error(ours, one_pass(Case(Rows, indexed), max_epochs=3)) <= ROUNDING
    assert ours.told == []
    assert ours.cause == "exact"


class Annealed(Task):
    """A term weighs what a callback says."""

    weight = 0.0

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        return mse_loss(predicted, batch[1]) + self.weight * predicted.square().mean()


class ByBatches(pl.Callback):
    """Counts the batches of the loop."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.batches, module.weight = 0, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.batches += 1
        module.weight = self.batches / 10


class BySteps(ByBatches):
    """Reads the optimizer's steps, and sets the learning rate by them, too."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.weight = trainer.global_step / 10
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + trainer.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("annealing", [ByBatches, BySteps])
@each_cut
def test_a_number_that_changes_between_micro_batches_is_told(annealing: type[pl.Callback], way: Way) -> None:
    ours, stock = train(Annealed(), loader(), way.callback(8, 3), annealing()), train(Annealed(), loader(), annealing())
    is_wrong = annealing is ByBatches and way.mode == "loader"
    assert (error(ours, stock) > 1e-3) is is_wrong
    assert ["changes weight" in text for text in ours.told] == [True] * is_wrong
    assert ours.cause == ("stateful" if is_wrong else "exact")


class Mixes(pl.Callback):
    """Mixes the samples of a batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].copy_(0.7 * batch[0] + 0.3 * batch[0].flip(0))


@each_cut
def test_batches_that_a_callback_changes_are_told_as_unknown_where_the_loader_cuts(way: Way) -> None:
    ours, stock = train(Task(), loader(), way.callback(8, 3), Mixes()), train(Task(), loader(), Mixes())
    is_wrong = way.mode == "loader"
    assert (error(ours, stock) > 1e-3) is is_wrong
    assert ["a callback changes batches" in text for text in ours.told] == [True] * is_wrong
    assert ours.cause == ("unmeasured" if is_wrong else "exact")


def mixed(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return 0.7 * inputs + 0.3 * inputs.flip(0), targets


def test_the_verdict_on_micro_batches_is_not_told_of_a_batch_in_pieces() -> None:
    case = Case(Task, lambda: DataLoader(pairs(48), batch_size=8, collate_fn=mixed))
    ours = train(case.module(), case.loader(), AutoAccumulate(micro_batch_size=8), memory=Memory(8), max_epochs=2)
    assert error(ours, one_pass(case, max_epochs=2)) <= ROUNDING
    (event,) = ours.ran_out
    assert SAME_RESULT in event


NUMBERS = np.random.default_rng(0)
COUNT = 0
HELD: dict[str, Any] = {}


def count_from_zero() -> Callable[[], int]:
    calls, steps = 0, itertools.count()

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls + next(steps)

    return count


COUNTER = count_from_zero()


class Outside(Task):
    """Uses global names, and those of enclosing functions."""

    of_class = 0

    def loss(self, batch: Any) -> torch.Tensor:
        global COUNT
        COUNT += 1
        type(self).of_class += 1
        HELD.setdefault("seen", []).append(len(batch[0]))
        noise = float(NUMBERS.random()) + COUNTER() + 0.1 * (COUNT + self.of_class + len(HELD["seen"]))
        return mse_loss(self.predict(batch[0]) + noise, batch[1])


def outside(*callbacks: pl.Callback) -> Trained:
    global COUNT, COUNTER, NUMBERS
    COUNT, COUNTER, NUMBERS, Outside.of_class = 0, count_from_zero(), np.random.default_rng(0), 0
    HELD.clear()
    return train(Outside(), loader(), *callbacks)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 8}])
def test_what_a_step_reaches_by_names_is_put_back(mode: str, settings: dict[str, Any]) -> None:
    stock, ours = outside(), outside(AutoAccumulate(micro_batching=mode, cache=False, **settings))
    assert torch.equal(stock.weights, ours.weights)
    assert HELD["seen"] == 6 * [8]


@each_way
def test_a_measurement_leaves_no_trace(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured before every window, a training with momentum and dropout is the same to the bit as never measured."""

    class Drops(Task):
        def predict(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().predict(torch.nn.functional.dropout(inputs, 0.2))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    monkeypatch.setattr(later, "FREE", 0)
    never = run(Case(Drops, loader), way, max_epochs=2)
    monkeypatch.setattr(later.LaterChecks, "_is_due", lambda self: True)
    always = run(Case(Drops, loader), way, max_epochs=2)
    assert torch.equal(never.weights, always.weights)
    assert always.told == []
