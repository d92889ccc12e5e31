"""What is said and done when memory runs out is true: of limits, results, random numbers and what a step gathers."""

from typing import Any, ClassVar

import pytest
import torch
from faults import Faults
from pairing import every_pair
from torch.utils.data import DataLoader
from true_support import (
    Case,
    ClassWeighted,
    Contrastive,
    Memory,
    Normalized,
    Queued,
    Summed,
    Task,
    Trained,
    Way,
    cut_rightly,
    each_oom,
    each_way,
    error,
    one_pass,
    pairs,
    parts_of_at_most,
    train,
)

from lightning_ga import AutoAccumulate
from lightning_ga.compat.logs import LogBuffer

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


def loader(batch: int, samples: int = 48) -> Any:
    return DataLoader(pairs(samples), batch_size=batch)


@every_pair(mode=["loader", "step"], place=["forward", "backward"], at=[1, 2, 3])
def test_the_limit_falls_below_what_failed(mode: str, place: str, at: int) -> None:
    """Batches of 24 in micro-batches of 12, of which the first or the second or a later one fails."""
    memory, callback = Memory(at, place=place), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), loader(24), callback, memory=memory, max_epochs=2)
    assert parts_of_at_most(ours.ran_out) < 12
    failed = next(index for index, size in enumerate(memory.sizes) if size < 12) - 1
    assert memory.sizes[: failed + 1] == [12] * (failed + 1)
    assert max(memory.sizes[failed + 1 :]) < 12
    assert callback.plan.micro_batch_size < 12
    assert error(ours, train(Task(), loader(24), max_epochs=2)) <= 1e-12


@MODES
def test_the_limit_falls_below_what_failed_each_time(mode: str) -> None:
    memory, callback = Memory(2, 5, place="forward"), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), loader(24), callback, memory=memory)
    assert max(memory.sizes[5:]) < 6
    assert error(ours, train(Task(), loader(24))) <= 1e-12


@each_way
def test_parts_are_as_one_pass(way: Way) -> None:
    cut_rightly(Case(Task, lambda: loader(8)), way)


INEXACT = {
    "batch_norm": (Normalized, "BatchNorm"),
    "coupled": (Contrastive, "coupl|compar|with each other"),
    "sum": (Summed, "sum"),
    "weighted": (ClassWeighted, "weight|mean over"),
    "stateful": (Queued, "queue"),
}


@each_oom
@pytest.mark.parametrize("cause", INEXACT)
def test_an_inexact_result_is_never_called_the_same(cause: str, way: Way) -> None:
    """At factor 1 nothing is said at the start, and the warning about memory names the verdict."""
    module, words = INEXACT[cause]
    ours = train(module(), loader(8), way.callback(8, 3), memory=way.memory())
    assert (ours.callback.oom_events, ours.callback.plan.factor, ours.told) == (1, 1, [])
    (text,) = ours.ran_out
    assert "same result" not in text
    assert _mentions(words, text), text
    assert ours.cause == cause


def _mentions(words: str, text: str) -> bool:
    return any(word.lower() in text.lower() for word in words.split("|"))


@each_oom
def test_what_was_not_measured_is_not_called_the_same(way: Way) -> None:
    case = Case(Task, lambda: loader(8))
    ours = train(case.module(), case.loader(), way.callback(8, 3, verify=False), memory=way.memory())
    assert error(ours, one_pass(case)) <= 1e-12
    assert "same result" not in ours.ran_out[0]


class MetaTensor(torch.Tensor):
    """A tensor that runs code of its own in every operation, as MONAI's does."""

    within = False
    operations: ClassVar[list[bool]] = []  # of training: whether each was within a step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Memory.in_use is not None and Memory.in_use.armed:
            MetaTensor.operations.append(MetaTensor.within)
        return super().__torch_function__(func, types, args, kwargs or {})


class LogsTensors(Task):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        MetaTensor.within = True
        value = self.loss(batch)
        self.log("loss", value.detach().clone().as_subclass(MetaTensor), on_step=True, on_epoch=True)
        MetaTensor.within = False
        return value


def logged(trained: Trained) -> list[float]:
    return [float(trained.trainer.callback_metrics[name]) for name in ("loss_step", "loss_epoch")]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_memory_that_runs_out_while_logs_are_replayed_is_survived(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values in the end are those of the run in which it did not; logs of whole batches are not replayed."""

    def fit() -> Trained:
        return train(LogsTensors(), loader(8), AutoAccumulate(micro_batch_size=4, micro_batching="step"))

    right, faults, replay = fit(), Faults(at), LogBuffer.replay

    def armed(*given: Any) -> None:
        faults.armed = Memory.in_use is not None and Memory.in_use.armed and faults.count < at
        replay(*given)
        faults.armed = False

    monkeypatch.setattr(LogBuffer, "replay", armed)
    with faults:
        ours = fit()
    assert faults.count == at
    assert error(ours, right) <= 1e-12
    assert logged(ours) == pytest.approx(logged(right))


@MODES
def test_what_is_logged_is_replayed_as_plain_tensors(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetaTensor, "operations", [])
    train(LogsTensors(), loader(8), AutoAccumulate(micro_batch_size=4, micro_batching=mode))
    assert set(MetaTensor.operations) == {True}
