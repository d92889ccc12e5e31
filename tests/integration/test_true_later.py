"""What the check before training cannot see, as it sees few samples and takes no step, training shows: it is told."""

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from pairing import every_pair
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize
from torch.utils.data import DataLoader, default_collate
from true_support import (
    FEATURES,
    LOADER,
    ROUNDING,
    STEP,
    Case,
    Memory,
    Sharpness,
    Task,
    Trained,
    Way,
    cut_rightly,
    each_cut,
    each_cut_in_step,
    each_oom,
    each_way,
    error,
    network,
    of_pairs,
    one_pass,
    pairs,
    parts_of_at_most,
    run,
    told,
    train,
)

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.fit.exactness import later, measure
from lightning_ga.plan.exactness import INEXACT, SAME_RESULT

LATER = "Accumulation is not exact for this training"


def late(begins: Callable[[Task], bool]) -> Callable[[], Task]:
    """A term of the variance over the batch that begins after a while."""

    def loss(task: Task, batch: Any) -> Tensor:
        predicted = task.predict(batch[0])
        return mse_loss(predicted, batch[1]) + (predicted.var() if begins(task) else 0.0)

    return lambda: Task(loss)


LATE = {
    "by batch": late(lambda task: task.trainer.fit_loop.epoch_loop.total_batch_idx >= 4),
    "by step": late(lambda task: task.global_step >= 5),
    "by epoch": late(lambda task: task.current_epoch > 2),
}


@pytest.mark.parametrize("begins", LATE)
@each_way
def test_a_term_that_begins_later_is_told_once(begins: str, way: Way) -> None:
    counts_batches = "|stateful" if begins == "by batch" else ""
    ours = told(Case(LATE[begins]), way, f"coupled{counts_batches}", LATER, max_epochs=6)
    assert len(ours.told) == 1


RHYTHMS = {
    "every tenth step": late(lambda task: task.global_step > 0 and task.global_step % 10 == 0),
    "the last of every twelve": late(lambda task: task.global_step % 12 == 11),
    "the last of every sixteen": late(lambda task: task.global_step % 16 == 15),
}


@pytest.mark.parametrize("comes", RHYTHMS)
@each_cut
def test_a_term_that_comes_every_so_many_steps_is_told_before_training(comes: str, way: Way) -> None:
    told(Case(RHYTHMS[comes]), way, "coupled", "not exact for this model", max_epochs=4)


class Unfrozen(Task):
    """BatchNorm is frozen in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.norm.train(self.current_epoch > 0)

    def loss(self, batch: Any) -> Tensor:
        return self.regression(self.norm(batch[0]), batch[1])


@pytest.mark.parametrize(("batch_norm", "times"), [("warn", 1), ("ignore", 0)])
@each_way
def test_batch_norm_that_is_trained_later_is_told_then(batch_norm: str, times: int, way: Way) -> None:
    unfrozen = Case(lambda: Unfrozen(norm=torch.nn.BatchNorm1d(FEATURES).double()))
    ours = run(unfrozen, way, max_epochs=3, arguments={"batch_norm": batch_norm})
    assert ours.cause == "batch_norm"
    assert len(ours.told) == times


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_an_error_in_a_batch_that_couples_is_not_told_as_the_same(mode: Any) -> None:
    """The term begins with the second batch, which runs out of memory."""
    callback = AutoAccumulate(micro_batch_size=8, micro_batching=mode)
    second = late(lambda task: task.trainer.fit_loop.epoch_loop.total_batch_idx >= 1)
    ours = train(second(), of_pairs(), callback, memory=Memory(2))
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
    cut_rightly(Case(), LOADER, max_epochs=14)
    assert measured == [(0, 1), (0, 2), (0, 4), (1, 6), (1, 8), (2, 12), (2, 16), (3, 18), (4, 24), (5, 32)]


# --- samples that come later --------------------------------------------------------------------

CLASSES = 4


def ignoring(ignored: int) -> Case:
    """A mean over the targets that are not ignored; few are."""
    samples = [(x, torch.tensor(number % CLASSES)) for number, (x, _) in enumerate(pairs(96))]
    for number in (41, 58, 77):
        samples[number] = samples[number][0], torch.tensor(ignored)

    def loss(task: Task, batch: Any) -> Tensor:
        return cross_entropy(task.predict(batch[0]), batch[1], ignore_index=ignored)

    return Case(lambda: Task(loss, outputs=CLASSES), lambda: DataLoader(samples, batch_size=8))


def ignoring_nan(*missing: int, micro: int = 3) -> Case:
    samples = pairs(96)
    for number in missing:
        samples[number] = samples[number][0], torch.full((1,), torch.nan, dtype=torch.float64)

    def loss(task: Task, batch: Any) -> Tensor:
        seen = ~batch[1].isnan()
        return mse_loss(task.predict(batch[0])[seen], batch[1][seen])

    return Case(lambda: Task(loss), lambda: DataLoader(samples, batch_size=8), micro=micro)


RARE = {
    r"normalize=TargetTokens\(1\)": ignoring(-100),
    r"normalize=TargetTokens\(1, ignore_index=255\)": ignoring(255),
    "": ignoring_nan(41, 58, 77),
}


@pytest.mark.parametrize("way_out", RARE)
@each_way
def test_kinds_of_samples_that_come_later_are_measured(way_out: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the check looks at hold none of them."""
    monkeypatch.setattr(measure, "CONSIDERED", measure.SAMPLES)
    ours = told(RARE[way_out], way, "weighted", f"{LATER}.*{way_out}")
    assert ours.told


@pytest.mark.parametrize("places", [(5,), (0, 1), (0, 4), (1, 3, 5, 7)], ids=str)
@each_cut
def test_a_rare_sample_is_found_wherever_it_lies_in_its_batch(places: tuple[int, ...], way: Way) -> None:
    """In any piece, and also where the halves of a piece hold as many, or each piece does."""
    rare = ignoring_nan(*(64 + place for place in places), micro=4)
    ours = run(rare, way)
    is_balanced = places in [(0, 4), (1, 3, 5, 7)]
    assert (error(ours, one_pass(rare)) <= ROUNDING) is is_balanced
    assert ours.cause == "weighted"
    assert len(ours.told) == 1


def rare_class(task: Task, batch: Any) -> Tensor:
    """One class in nine is rare, and weighs more."""
    return cross_entropy(task.predict(batch[0]), batch[1], weight=torch.tensor([0.2, 5.0], dtype=torch.float64))


@each_way
def test_a_rare_class_is_among_the_samples_that_are_measured(way: Way) -> None:
    samples = [(x, int(number % 9 == 4)) for number, (x, _) in enumerate(pairs(36))]
    case = Case(lambda: Task(rare_class, outputs=2), lambda: DataLoader(samples, batch_size=12), 12, 4)
    told(case, way, "weighted")


def weighed(task: Task, batch: Any) -> Tensor:
    """A mean by weights of samples, of which few are not one."""
    errors = (task.predict(batch[0]) - batch[1]).square().mean(1)
    return (errors * batch[2]).sum() / batch[2].sum()


@pytest.mark.parametrize("rare", [(7, 22), (70, 75)], ids=["before training", "later"])
@each_way
def test_rare_weights_of_samples_are_found(rare: tuple[int, ...], way: Way) -> None:
    """Among the samples that are looked at first, and after them."""
    weights = [torch.tensor(0.25 if number in rare else 1.0).double() for number in range(96)]
    samples = [(*pair, weight) for pair, weight in zip(pairs(96), weights, strict=True)]
    told(Case(lambda: Task(weighed), lambda: DataLoader(samples, batch_size=8)), way, "weighted")


def triplets(task: Task, batch: Any) -> Tensor:
    """Hard triplets within a batch; few samples hold none."""
    inputs, labels = batch
    embedded, itself = task.predict(inputs), torch.eye(len(labels), dtype=torch.bool)
    distances, same = torch.cdist(embedded, embedded), (labels[:, None] == labels[None]) & ~itself
    found = [(d[s].max() - d[~s & ~i].min() + 5.0).relu() for d, s, i in zip(distances, same, itself) if s.any()]
    return torch.stack(found).mean() if found else 0.0 * embedded.sum()


def of_many_classes() -> Any:
    """Each class comes again after eight samples."""
    return DataLoader([(x, torch.tensor(number % 8)) for number, (x, _) in enumerate(pairs(64))], batch_size=16)


@each_way
def test_more_samples_are_looked_at_until_there_is_a_gradient(way: Way) -> None:
    told(Case(lambda: Task(triplets, outputs=3), of_many_classes, batch=16, micro=10), way, "|".join(INEXACT))


# --- state that hooks and callbacks change ------------------------------------------------------


class Averaged(Task):
    """An average that follows in ``on_before_zero_grad``, as ModelEmaV3 of timm is used, for validation alone."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for old, new in zip(self.average.parameters(), self.net.parameters()):
            old.data.lerp_(new.data, 0.1)


def averaged() -> Task:
    return Averaged(average=network().requires_grad_(False))


def renormalizing(task: Task, batch: Any) -> Tensor:
    """Normalizes a weight in its step, as prototypes are: a second time changes nothing."""
    with torch.no_grad():
        task.net[2].weight.copy_(normalize(task.net[2].weight, dim=1))
    return task.regression(*batch)


def of_rows(task: Task, batch: Any) -> Tensor:
    """A memory with a row for each sample."""
    inputs, targets, index = batch
    predicted = task.predict(inputs)
    value = mse_loss(predicted, targets) + mse_loss(predicted, task.memory[index].clone())
    with torch.no_grad():
        task.memory[index] = 0.5 * task.memory[index] + 0.5 * predicted.detach()
    return value


def numbered() -> Any:
    return DataLoader([(x, y, number) for number, (x, y) in enumerate(pairs(44))], batch_size=8)


class WeighsByEpoch(Task):
    """Losses that are gathered weigh the losses of the next epoch."""

    def __init__(self) -> None:
        super().__init__(gathered=[], before=torch.ones((), dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        value = self.regression(*batch[:2])
        self.gathered.append(value.detach())
        return value * self.before.tanh()

    def on_train_epoch_end(self) -> None:
        self.before, self.gathered = torch.stack(self.gathered).mean(), []


class WeighsByEpochs(WeighsByEpoch):
    """How losses have fallen from one epoch to the next weighs those of the third (dynamic weight averaging)."""

    def on_train_epoch_end(self) -> None:
        means = [*getattr(self, "means", []), float(torch.stack(self.gathered).mean())]
        self.means, self.gathered = means, []
        if len(means) > 1:
            self.before = torch.tensor(means[-1] / means[-2], dtype=torch.float64)


class LogsByEpoch(WeighsByEpoch):
    """Gathers losses to log their mean, as many programs do."""

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.gathered).mean())
        self.gathered.clear()


NO_MATTER = {
    "an average that no loss reads": Case(averaged),
    "a weight that is normalized again": Case(lambda: Task(renormalizing)),
    "a memory of samples": Case(lambda: Task(of_rows, memory=torch.zeros(48, 1, dtype=torch.float64)), numbered),
    "what is gathered to be logged": Case(LogsByEpoch, numbered),
}


@pytest.mark.parametrize("number", [6, 8])
def test_an_average_that_follows_as_gradients_are_zeroed_follows_once_for_each_window(number: int) -> None:
    """Though ``tensor.data`` counts no versions, if memory runs out later in a window, or where one was measured."""
    ours = train(averaged(), of_pairs(), AutoAccumulate(micro_batch_size=4), memory=Memory(number))
    assert ours.told == []
    assert ["with the same result" in text for text in ours.ran_out] == [True]
    assert error(ours, one_pass(Case(averaged))) <= ROUNDING


@pytest.mark.parametrize("name", NO_MATTER)
@each_cut
def test_state_that_changes_no_gradient_is_no_matter(name: str, way: Way) -> None:
    cut_rightly(NO_MATTER[name], way, max_epochs=2)


def test_state_that_changes_no_gradient_is_no_matter_after_an_error() -> None:
    ours = run(NO_MATTER["an average that no loss reads"], STEP)
    assert all("hook" not in text and "Its gradient" not in text for text in ours.ran_out)


class Annealed(Task):
    """A term weighs what a callback says."""

    weight = 0.0

    def loss(self, batch: Any) -> Tensor:
        return self.regression(*batch) + self.weight * self.predict(batch[0]).square().mean()


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


class Mixes(pl.Callback):
    """Mixes the samples of a batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].copy_(0.7 * batch[0] + 0.3 * batch[0].flip(0))


BY_CALLBACKS: list[tuple[type[Task], Callable[[], pl.Callback], str, str]] = [
    (Annealed, ByBatches, "stateful", "changes weight"),
    (Annealed, BySteps, "exact", ""),
    (Task, Mixes, "unmeasured", "a callback changes batches"),
]


@pytest.mark.parametrize(("module", "callback", "cause", "words"), BY_CALLBACKS)
@each_cut
def test_what_callbacks_change_between_micro_batches_is_told(
    module: Any, callback: Any, cause: str, words: str, way: Way
) -> None:
    """Where the loader cuts: a number, or the batches themselves; not a number that follows optimizer steps."""
    ours = train(module(), of_pairs(), way.callback(8, 3), callback())
    stock = train(module(), of_pairs(), callback())
    is_wrong = cause != "exact" and way is LOADER
    assert (error(ours, stock) > 1e-3) is is_wrong
    assert [words in text for text in ours.told] == [True] * is_wrong
    assert ours.cause == (cause if is_wrong else "exact")


def test_the_verdict_on_micro_batches_is_not_told_of_a_batch_in_pieces() -> None:
    def mixed(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return 0.7 * inputs + 0.3 * inputs.flip(0), targets

    case = Case(loader=lambda: of_pairs(collate_fn=mixed))
    ours = train(case.module(), case.loader(), AutoAccumulate(micro_batch_size=8), memory=Memory(8), max_epochs=2)
    assert error(ours, one_pass(case, max_epochs=2)) <= ROUNDING
    (event,) = ours.ran_out
    assert SAME_RESULT in event


class ReadsParts(Task):
    """Divides by the mean of norms that it reads after backward passes."""

    norm = 0.0

    def on_after_backward(self) -> None:
        self.norm = 0.9 * self.norm + float(self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.div_(1 + self.norm)


WRONG_IN = {
    ReadsParts: (LOADER,),
    WeighsByEpoch: (LOADER, STEP),
    WeighsByEpochs: (LOADER, STEP),
}


@pytest.mark.parametrize("module", WRONG_IN)
@each_cut
def test_what_a_later_hook_or_window_meets_is_told(module: Any, way: Way) -> None:
    """The parts give the gradient of the batch, and what they leave is not what the batch leaves."""
    case = Case(module, numbered if issubclass(module, WeighsByEpoch) else of_pairs, micro=4)
    ours, stock = run(case, way, max_epochs=3), one_pass(case, max_epochs=3)
    if way not in WRONG_IN[module]:
        assert error(ours, stock) <= ROUNDING
        assert (ours.told, ours.cause) == ([], "exact")
        return
    assert float((ours.weights - stock.weights).norm()) > 1e-4
    (text,) = ours.told
    assert "keeps something of each pass" in text
    assert ours.cause == "stateful"


class Taught(Task):
    """A teacher that a callback lets follow in one hook, by ``.data``, as in lightning-bolts."""

    def __init__(self, hook: str) -> None:
        super().__init__(hook=hook, teacher=network().requires_grad_(False))

    def loss(self, batch: Any) -> Tensor:
        return self.regression(*batch) + mse_loss(self.predict(batch[0]), self.teacher(batch[0]) + 1)

    def configure_callbacks(self) -> Any:
        follow = pl.Callback()
        vars(follow)[self.hook] = lambda trainer, module, *_: module.follow()
        return [follow]

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters()):
            old.data = 0.5 * old.data + 0.5 * new.data


@pytest.mark.parametrize(
    ("hook", "way"), [("on_train_batch_end", LOADER), ("on_before_zero_grad", LOADER), ("on_before_zero_grad", STEP)]
)
def test_a_callback_that_lets_a_teacher_follow_within_a_window_is_told(hook: str, way: Way) -> None:
    """Once, as soon as it does; the record of the check says so, too."""
    told(Case(lambda: Taught(hook)), way, "stateful", r"teacher\.")


# --- schedules and optimizers -------------------------------------------------------------------


class SteppedByHand(Task):
    """A schedule that is stepped after every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


class Sharp(Task):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (SteppedByHand, "the learning rate of group 0"),
        (Sharp, "Sharpness evaluates its closure more than once"),
    ],
)
def test_what_each_micro_batch_moves_is_told(module: Any, words: str) -> None:
    """A schedule that is stepped after it, and an optimizer that evaluates it again; a whole batch is right."""
    told(Case(module), LOADER, "exact|stateful", words)
    assert run(Case(module), STEP).told == []


@each_cut_in_step
def test_an_optimizer_that_evaluates_a_whole_batch_again_is_exact(way: Way) -> None:
    ours = run(Case(Sharp), way)
    assert error(ours, one_pass(Case(Sharp))) <= ROUNDING
    assert ours.told == []


# --- parts that are left out --------------------------------------------------------------------


class Choosy(Task):
    """Leaves out a batch by what it holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.loss(batch)
        return None if batch[1].sum() < 0 else value


def some_large(count: int) -> Case:
    samples = [(inputs, targets + 50 * (number % 16 == 0)) for number, (inputs, targets) in enumerate(pairs(count))]
    return Case(Choosy, lambda: DataLoader(samples, batch_size=8))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@each_oom
def test_parts_that_are_left_out_are_not_called_the_same_result(way: Way) -> None:
    case = some_large(8)
    ours = run(case, way)
    assert error(ours, one_pass(case)) > 1e-3
    (text,) = ours.ran_out
    assert "same result" not in text
    assert "returned None for some" in text


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("arguments", [{}, {"on_oom": "raise"}])
@each_cut
def test_parts_that_are_left_out_are_told(way: Way, arguments: dict[str, Any]) -> None:
    ours = run(some_large(48), way, arguments=arguments)
    assert len(ours.told) == len(set(ours.told)) <= 2  # that it depends on what is together may be measured, too
    assert "returned None for some of a window's micro-batches" in ours.told[0] or ours.cause == "coupled"
    assert ours.cause != "exact"


class SkipsNan(Task):
    """Leaves out batches whose loss is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.loss(batch)
        return None if value.isnan() else value


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("place", [16, 23])
@each_way
def test_a_window_with_a_loss_that_is_no_number_is_left_out_whole(place: int, way: Way) -> None:
    samples = [(x, y * torch.nan if number in (place, place + 16) else y) for number, (x, y) in enumerate(pairs(48))]
    case = Case(SkipsNan, lambda: DataLoader(samples, batch_size=8))
    ours = run(case, way)
    assert error(ours, one_pass(case)) <= ROUNDING
    (text,) = ours.told
    assert "the whole window is left out" in text


class SkipsEmpty(Task):
    """Leaves out batches without a positive sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        positive = batch[1][:, 0] > 0
        return self.regression(batch[0][positive], batch[1][positive]) if positive.any() else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@each_cut
def test_a_window_is_trained_if_parts_hold_nothing_to_train_on(way: Way) -> None:
    samples = [(x, y.abs() * (1 if number % 8 < 3 else -1)) for number, (x, y) in enumerate(pairs(48))]
    case = Case(SkipsEmpty, lambda: DataLoader(samples, batch_size=8))
    ours = run(case, way)
    assert error(ours, one_pass(case)) <= ROUNDING
    assert ours.cause in ("weighted", "coupled", "stateful")


# --- memory that runs out -----------------------------------------------------------------------


@every_pair(mode=["loader", "step"], place=["forward", "backward"], at=[1, 2, 3])
def test_the_limit_falls_below_what_failed(mode: Any, place: str, at: int) -> None:
    """Batches of 24 in micro-batches of 12, of which the first or the second or a later one fails."""
    memory, callback = Memory(at, place=place), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), of_pairs(48, 24), callback, memory=memory, max_epochs=2)
    assert parts_of_at_most(ours.ran_out) < 12
    failed = next(index for index, size in enumerate(memory.sizes) if size < 12) - 1
    assert memory.sizes[: failed + 1] == [12] * (failed + 1)
    assert max(memory.sizes[failed + 1 :]) < 12
    assert callback.plan.micro_batch_size < 12
    assert error(ours, train(Task(), of_pairs(48, 24), max_epochs=2)) <= ROUNDING


@each_oom
def test_parts_that_draw_numbers_of_their_own_are_not_called_the_same_result(way: Way) -> None:
    """The check switches dropout off, and finds the rest exact."""
    dropping = Case(lambda: Task(lambda task, batch: task.regression(dropout(batch[0], 0.5), batch[1])))
    ours = run(dropping, way)
    assert ours.cause == "exact"
    (text,) = ours.ran_out
    assert SAME_RESULT not in text
    assert "draw random numbers" in text


def halved_unseen(task: Task, batch: Any) -> Tensor:
    """Halves its batch where no version tells."""
    batch[0].data.mul_(0.5)
    return task.regression(*batch)


@pytest.mark.parametrize(("mode", "at", "micro"), [("loader", 1, 8), ("step", 5, 8), ("step", 2, 4)])
def test_a_batch_that_is_overwritten_unseen_is_not_run_again(mode: Any, at: int, micro: int) -> None:
    """Nor one that ran in pieces, which share its memory on a CPU."""
    callback = AutoAccumulate(micro_batch_size=micro, micro_batching=mode, verify=micro == 8)
    with pytest.raises(UserError, match="had changed its batch in place"):
        train(Task(halved_unseen), of_pairs(), callback, memory=Memory(at))


# --- what measurements leave behind -------------------------------------------------------------

NUMBERS, COUNT = np.random.default_rng(0), 0
HELD: dict[str, Any] = {}


def count_from_zero() -> Callable[[], int]:
    steps = itertools.count()
    return lambda: next(steps)


COUNTER = count_from_zero()


class Outside(Task):
    """Uses global names, and those of enclosing functions."""

    of_class = 0

    def loss(self, batch: Any) -> Tensor:
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
    return train(Outside(), of_pairs(), *callbacks)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 8}])
def test_what_a_step_reaches_by_names_is_put_back(mode: Any, settings: dict[str, Any]) -> None:
    stock, ours = outside(), outside(AutoAccumulate(micro_batching=mode, cache=False, **settings))
    assert torch.equal(stock.weights, ours.weights)
    assert HELD["seen"] == 6 * [8]


class ByAdam(Task):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@each_way
def test_a_measurement_leaves_no_trace(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured before every window, a training with momentum and dropout is the same to the bit as never measured."""
    drops = Case(lambda: ByAdam(lambda task, batch: mse_loss(task.predict(dropout(batch[0], 0.2)), batch[1])))
    monkeypatch.setattr(later, "FREE", 0)
    never = run(drops, way, max_epochs=2)
    monkeypatch.setattr(later.LaterChecks, "_is_due", lambda self: True)
    always = run(drops, way, max_epochs=2)
    assert torch.equal(never.weights, always.weights)
    assert always.told == []
