"""What is said and done when memory runs out is true: of limits, results, random numbers and what a step gathers."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from faults import Faults
from pairing import every_pair
from torch.nn.functional import mse_loss
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
    comes_from_memory,
    cut_rightly,
    each_oom,
    each_way,
    error,
    one_pass,
    pairs,
    parts_of_at_most,
    train,
)

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.errors import RankError
from lightning_ga.fit.log_buffer import LogBuffer

MODES = pytest.mark.parametrize("mode", ["loader", "step"])


def loader(batch: int, samples: int = 48) -> Any:
    return DataLoader(pairs(samples), batch_size=batch)


# --- limits -------------------------------------------------------------------------------------


@every_pair(mode=["loader", "step"], place=["forward", "backward"], at=[1, 2, 3])
def test_the_limit_falls_below_what_failed(mode: str, place: str, at: int) -> None:
    """Batches of 24 in micro-batches of 12, of which the first or the second or a later one fails.

    In every pair of values: which one fails and where in its pass matters to neither mode alone.
    """
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
    """Again and again: 12 fail, and then 6, where another 6 had passed."""
    memory, callback = Memory(2, 5, place="forward"), AutoAccumulate(24, micro_batch_size=12, micro_batching=mode)
    ours = train(Task(), loader(24), callback, memory=memory)
    assert max(memory.sizes[5:]) < 6
    assert error(ours, train(Task(), loader(24))) <= 1e-12


@each_way
def test_parts_are_as_one_pass(way: Way) -> None:
    """The plain case, which says that its result is the same."""
    cut_rightly(Case(Task, lambda: loader(8)), way)


# --- what is said -------------------------------------------------------------------------------


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
    """``verify=False``: an exact model, of which nobody knows that it is."""
    case = Case(Task, lambda: loader(8))
    ours = train(case.module(), case.loader(), way.callback(8, 3, verify=False), memory=way.memory())
    assert error(ours, one_pass(case)) <= 1e-12
    assert "same result" not in ours.ran_out[0]


# --- what a failed attempt leaves behind --------------------------------------------------------

GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "np.random.RandomState": (lambda: np.random.RandomState(3), lambda rng, n: rng.standard_normal(n)),
    "np.random.Generator": (lambda: np.random.default_rng(3), lambda rng, n: rng.standard_normal(n)),
    "random.Random": (lambda: random.Random(3), lambda rng, n: [rng.gauss(0, 1) for _ in range(n)]),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda rng, n: torch.randn(n, generator=rng, dtype=torch.float64),
    ),
    "numpy's own": (lambda: None, lambda _, n: np.random.standard_normal(n)),
    "Python's own": (lambda: None, lambda _, n: [random.gauss(0, 1) for _ in range(n)]),
    "torch's own": (lambda: None, lambda _, n: torch.randn(n, dtype=torch.float64)),
}


class Noise(torch.nn.Module):
    """A part of a module, with a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made, self.draw = GENERATORS[kind]
        self.rng = made()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.as_tensor(self.draw(self.rng, len(inputs))).double()[:, None]


class Noisy(Task):
    """Adds noise to its inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made, self.draw = GENERATORS[kind]
        self.rng = made()
        self.noise = Noise(kind)

    def loss(self, batch: Any) -> torch.Tensor:
        own = torch.as_tensor(self.draw(self.rng, len(batch[0]))).double()[:, None]
        return mse_loss(self.predict(self.noise(batch[0]) + own), batch[1])


@MODES
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_put_back(kind: str, mode: str) -> None:
    """What ran out with 12 samples and went through with 6 and 6 draws what 6 and 6 would have drawn."""

    def fit(micro: int, cut: str, *at: int) -> Trained:
        np.random.seed(5)
        random.seed(5)
        callback = AutoAccumulate(micro_batch_size=micro, micro_batching=cut, verify=False)
        return train(Noisy(kind), loader(12), callback, memory=Memory(*at))

    failed, whole = fit(12, mode, 1), fit(6, "step")
    assert failed.callback.oom_events == 1
    assert torch.equal(failed.gradients[0], whole.gradients[0])
    if mode == "step":
        assert torch.equal(failed.weights, whole.weights)


class Gathering(Task):
    """Keeps what it predicted for the end of the epoch, as many do by hand."""

    def __init__(self, keep: Callable[["Gathering", torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.keep = keep
        self.outputs: Any = []
        self.history: dict[str, list[Any]] = {"preds": [], "targets": []}

    def loss(self, batch: Any) -> torch.Tensor:
        early = self.net(batch[0]).detach()
        self.keep(self, early, batch[1])
        return super().loss(batch)


def gathered(module: Gathering) -> list[float]:
    """All predictions that were kept."""
    kept = [entry["preds"] if isinstance(entry, dict) else entry[0] for entry in module.outputs]
    kept += module.history["preds"]
    return [float(value) for part in kept for value in torch.as_tensor(part).flatten()]


def keep_anew(module: Gathering, preds: torch.Tensor, targets: torch.Tensor) -> None:
    module.outputs = [*module.outputs, {"preds": preds}]


def keep_lists(module: Gathering, preds: torch.Tensor, targets: torch.Tensor) -> None:
    module.history["preds"].append(preds)
    module.history["targets"].append(targets)


KEEPS = {
    "dict": lambda m, p, t: m.outputs.append({"preds": p, "targets": t, "n": len(p)}),
    "nested": lambda m, p, t: m.outputs.append({"preds": p, "more": {"targets": [t], "name": "b"}}),
    "tuple": lambda m, p, t: m.outputs.append((p, t, len(p))),
    "numpy": lambda m, p, t: m.outputs.append({"preds": p.numpy(), "n": len(p)}),
    "plain": lambda m, p, t: m.outputs.append({"preds": p.flatten().tolist(), "n": len(p)}),
    "extended": lambda m, p, t: m.outputs.extend({"preds": row} for row in p.split(1)),
    "lists": keep_lists,
    "anew": keep_anew,
}


@every_pair(keep=KEEPS, mode=["loader", "step"], at=[(1,), (1, 4)])
def test_what_a_step_gathers_by_hand_adds_up(keep: Any, mode: str, at: tuple[int, ...]) -> None:
    """Each of the 64 samples once, in order, wherever memory ran out.

    In every pair of values: each way to gather in both modes, and where memory runs out once and twice.
    """
    module, right = Gathering(keep), Gathering(keep)
    callback = AutoAccumulate(micro_batch_size=16, micro_batching=mode)
    ours = train(module, loader(16, 64), callback, memory=Memory(*at))
    assert callback.oom_events >= 1
    assert error(ours, train(right, loader(16, 64))) <= 1e-12
    assert len(gathered(module)) == 64
    assert gathered(module) == pytest.approx(gathered(right), rel=1e-6)


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
    """Their own code, which may be slow, runs within the step alone."""
    monkeypatch.setattr(MetaTensor, "operations", [])
    train(LogsTensors(), loader(8), AutoAccumulate(micro_batch_size=4, micro_batching=mode))
    assert set(MetaTensor.operations) == {True}


# --- errors that end a run ----------------------------------------------------------------------


class Huge(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        value = super().loss(batch)
        if Memory.in_use is not None and Memory.in_use.armed:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return value


@MODES
def test_the_error_of_a_single_device_speaks_of_no_ranks(mode: str) -> None:
    """A ``UserError``, raised from the error of memory."""
    callback = AutoAccumulate(micro_batch_size=8, micro_batching=mode, verify=False)
    with pytest.raises(UserError) as caught:
        train(Huge(), loader(8), callback)
    assert not isinstance(caught.value, RankError)
    assert comes_from_memory(caught.value)
    assert "memory" in str(caught.value).lower()
    assert " rank" not in str(caught.value)
