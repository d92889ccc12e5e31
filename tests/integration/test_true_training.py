"""What the exactness check cannot see, as it calls no callback and takes no step, training itself shows: it is told."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from true_support import (
    FEATURES,
    LOADER,
    ROUNDING,
    STEP,
    Case,
    Memory,
    Sharpness,
    Task,
    Way,
    each_cut,
    each_cut_in_step,
    each_oom,
    each_way,
    error,
    network,
    one_pass,
    pairs,
    run,
    train,
)

from lightning_ga import AutoAccumulate, UserError


def loader() -> Any:
    return DataLoader(pairs(48), batch_size=8)


class Taught(Task):
    """A teacher that callbacks let follow."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = network(FEATURES, 1).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        return mse_loss(predicted, batch[1]) + mse_loss(predicted, self.teacher(batch[0]) + 1)


class Follow(pl.Callback):
    """As in lightning-bolts: by ``.data``, in one hook."""

    def __init__(self, hook: str = "") -> None:
        vars(self)[hook] = lambda trainer, module, *_: self.follow(module)

    def follow(self, module: Any) -> None:
        for old, new in zip(module.teacher.parameters(), module.net.parameters()):
            old.data = 0.5 * old.data + 0.5 * new.data


class SteppedByHand(Task):
    """A schedule that is stepped after every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_is_stepped_after_every_micro_batch_is_told() -> None:
    ours = run(Case(SteppedByHand, loader), LOADER)
    assert error(ours, one_pass(Case(SteppedByHand, loader))) > 1e-3
    (text,) = ours.told
    assert "the learning rate of group 0" in text
    assert run(Case(SteppedByHand, loader), STEP).told == []


class Sharp(Task):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters())


def test_an_optimizer_that_evaluates_the_last_micro_batch_again_is_told() -> None:
    ours = run(Case(Sharp, loader), LOADER)
    assert error(ours, one_pass(Case(Sharp, loader))) > 1e-3
    (text,) = ours.told
    assert "Sharpness evaluates its closure more than once" in text


@each_cut_in_step
def test_an_optimizer_that_evaluates_a_whole_batch_again_is_exact(way: Way) -> None:
    ours = run(Case(Sharp, loader), way)
    assert error(ours, one_pass(Case(Sharp, loader))) <= ROUNDING
    assert ours.told == []


class Choosy(Task):
    """Leaves out a batch by what it holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.loss(batch)
        return None if batch[1].sum() < 0 else value


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@each_oom
def test_parts_that_are_left_out_are_not_called_the_same_result(way: Way) -> None:
    samples = [(inputs, targets + 50 * (not number)) for number, (inputs, targets) in enumerate(pairs(8))]
    case = Case(Choosy, lambda: DataLoader(samples, batch_size=8))
    ours = run(case, way)
    assert error(ours, one_pass(case)) > 1e-3
    (text,) = ours.ran_out
    assert "same result" not in text
    assert "returned None for some" in text


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("arguments", [{}, {"on_oom": "raise"}])
@each_cut
def test_parts_that_are_left_out_are_told(way: Way, arguments: dict[str, Any]) -> None:
    samples = [(inputs, targets + 50 * (number % 16 == 0)) for number, (inputs, targets) in enumerate(pairs(48))]
    ours = run(Case(Choosy, lambda: DataLoader(samples, batch_size=8)), way, arguments=arguments)
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
    assert len(ours.told) == 1
    assert "the whole window is left out" in ours.told[0]


class SkipsEmpty(Task):
    """Leaves out batches without a positive sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        positive = batch[1][:, 0] > 0
        return mse_loss(self.predict(batch[0])[positive], batch[1][positive]) if positive.any() else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@each_cut
def test_a_window_is_trained_if_parts_hold_nothing_to_train_on(way: Way) -> None:
    samples = [(x, y.abs() * (1 if number % 8 < 3 else -1)) for number, (x, y) in enumerate(pairs(48))]
    case = Case(SkipsEmpty, lambda: DataLoader(samples, batch_size=8))
    ours = run(case, way)
    assert error(ours, one_pass(case)) <= ROUNDING
    assert ours.cause in ("weighted", "coupled", "stateful")


class Dropping(Task):
    """The check switches dropout off, and finds the rest exact."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([self.drop(batch[0]), batch[1]])


@each_oom
def test_parts_that_draw_numbers_of_their_own_are_not_called_the_same_result(way: Way) -> None:
    ours = run(Case(Dropping, loader), way)
    assert ours.cause == "exact"
    (text,) = ours.ran_out
    assert "with the same result" not in text
    assert "draw random numbers" in text


class Overwriting(Task):
    """Halves its batch where no version tells."""

    def loss(self, batch: Any) -> torch.Tensor:
        batch[0].data.mul_(0.5)
        return super().loss(batch)


class OverwritingByNumPy(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        values = batch[0].numpy()
        values *= 0.5
        return super().loss(batch)


@pytest.mark.parametrize("module", [Overwriting, OverwritingByNumPy])
@pytest.mark.parametrize(("mode", "at"), [("loader", 1), ("step", 5)])
def test_a_batch_that_is_overwritten_unseen_is_not_run_again(module: Any, mode: str, at: int) -> None:
    callback = AutoAccumulate(micro_batch_size=8, micro_batching=mode)
    with pytest.raises(UserError, match="had changed its batch in place"):
        train(module(), loader(), callback, memory=Memory(at))


class StepsByBatch(Task):
    """Takes a step after every second batch, by its number."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


class ReadsParts(Task):
    """Divides by the mean of norms that it reads after backward passes."""

    norm = 0.0

    def on_after_backward(self) -> None:
        self.norm = 0.9 * self.norm + float(self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.div_(1 + self.norm)


class WritesLast(Task):
    """The hook of a batch writes what the step has left for it into a memory that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(48, 1, dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        self.last = batch[2], predicted.detach()
        return mse_loss(predicted, batch[1] + self.memory[batch[2]])

    def on_train_batch_end(self, *_: Any) -> None:
        self.memory[self.last[0]] = self.last[1]


class WeighsByEpoch(Task):
    """Losses that are gathered weigh the losses of the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[torch.Tensor] = []
        self.before = torch.ones((), dtype=torch.float64)

    def loss(self, batch: Any) -> torch.Tensor:
        value = super().loss(batch[:2])
        self.gathered.append(value.detach())
        return value * self.before.tanh()

    def on_train_epoch_end(self) -> None:
        self.before, self.gathered = torch.stack(self.gathered).mean(), []


class LogsByEpoch(WeighsByEpoch):
    """Gathers losses to log their mean, as many programs do."""

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.gathered).mean())
        self.gathered.clear()


def numbered() -> Any:
    return DataLoader([(x, y, number) for number, (x, y) in enumerate(pairs(44))], batch_size=8)


WRONG_IN = {
    StepsByBatch: (LOADER,),
    ReadsParts: (LOADER,),
    WritesLast: (STEP,),  # the hook sees the last piece of a batch; each micro-batch has a row for each of its samples
    WeighsByEpoch: (LOADER, STEP),
}


@pytest.mark.parametrize("module", WRONG_IN)
@each_cut
def test_what_a_later_hook_or_window_meets_is_told(module: Any, way: Way) -> None:
    """The parts give the gradient of the batch, and what they leave is not what the batch leaves."""
    case = Case(module, numbered if module in (WritesLast, WeighsByEpoch) else loader, micro=4)
    ours, stock = run(case, way, max_epochs=2), one_pass(case, max_epochs=2)
    if way not in WRONG_IN[module]:
        assert error(ours, stock) <= ROUNDING
        assert (ours.told, ours.cause) == ([], "exact")
        return
    assert float((ours.weights - stock.weights).norm()) > 1e-4
    (told,) = ours.told
    assert ("number of its batch" if module is StepsByBatch else "keeps something of each pass") in told
    assert ours.cause == "stateful"


@each_way
def test_what_is_gathered_to_be_logged_is_no_matter(way: Way) -> None:
    ours = run(Case(LogsByEpoch, numbered), way, max_epochs=2)
    assert error(ours, one_pass(Case(LogsByEpoch, numbered), max_epochs=2)) <= ROUNDING
    assert (ours.told, ours.cause) == ([], "exact")


class TaughtAfterBatch(Taught):
    def configure_callbacks(self) -> Any:
        return [Follow("on_train_batch_end")]


class TaughtBeforeZeroing(Taught):
    def configure_callbacks(self) -> Any:
        return [Follow("on_before_zero_grad")]


@pytest.mark.parametrize(
    ("module", "way"), [(TaughtAfterBatch, LOADER), (TaughtBeforeZeroing, LOADER), (TaughtBeforeZeroing, STEP)]
)
def test_a_callback_that_lets_a_teacher_follow_within_a_window_is_told(module: Any, way: Way) -> None:
    """Once, as soon as it does; the record of the check says so, too."""
    ours = run(Case(module, loader), way)
    assert error(ours, one_pass(Case(module, loader))) > 1e-3
    assert ours.cause == "stateful"
    (text,) = ours.told
    assert "teacher." in text
