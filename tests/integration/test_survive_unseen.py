"""Memory runs out after a step has changed what no optimizer's step changes: it comes back, is named, or ends the run.

Weights and teachers, gradients that are not zeroed as PyTorch does it, and what users hang on a module.
"""

import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from faults import CountAttempts
from reference import FEATURES, Regression, Samples, fit, loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError

MODES = pytest.mark.parametrize("mode", ["loader", "step"])
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
LEFT = "is as the failed attempt left it"
SAME = "with the same result"


class RunsOut(Regression):
    """Runs out of memory at an attempt in training (from 1).

    In the forward pass, in the backward pass before there are gradients, or when those of the last layer are there.
    """

    def __init__(self, at: int = 0, place: str = "last layer") -> None:
        super().__init__()
        self.at, self.fails_in, self.attempts = at, place, iter(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fails = next(self.attempts, None) == self.at
        hidden = self.net[1](self.net[0](batch[0]))
        predicted = self.net[2](hidden)
        self.look(predicted)
        if fails and self.fails_in == "forward":
            self.fail()
        value = torch.nn.functional.mse_loss(predicted, batch[1])
        if fails:
            (value if self.fails_in == "loss" else hidden).register_hook(self.fail)
        return value

    def look(self, predicted: torch.Tensor) -> None:
        """Do what a step may do besides."""

    def fail(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some gradients are gone."""


def train(module: Regression, *callbacks: Any, samples: int, batch_size: int = 8, factor: int = 1) -> torch.Tensor:
    """The weights after an epoch."""
    settings = {"max_epochs": 1, "accumulate_grad_batches": factor}
    fit(DataLoader(Samples(samples), batch_size=batch_size), *callbacks, CountAttempts(), module=module, **settings)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def told(module: Regression, callback: AutoAccumulate, **settings: Any) -> tuple[str, torch.Tensor]:
    """What the warning says of an error in training, and the weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train(module, callback, **settings)
    assert callback.oom_events == 1
    (text,) = [str(each.message) for each in caught if "Memory ran out in" in str(each.message)]
    return text, weights


# --- weights ------------------------------------------------------------------------------------


class InBackward(RunsOut):
    """The last layer is updated within the backward pass, the first by the optimizer."""

    def __init__(self, update: Callable[[Any], Callable[[torch.Tensor], None]], **trouble: Any) -> None:
        super().__init__(**trouble)
        for parameter in self.net[2].parameters():
            parameter.register_post_accumulate_grad_hook(update(parameter))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.net[0].parameters(), lr=0.1)


def stepping(optimizer: Callable[[Any], torch.optim.Optimizer], parameter: Any) -> Callable[[torch.Tensor], None]:
    """As in PyTorch's tutorial on optimizers in the backward pass."""
    inner = optimizer([parameter])

    def step(_: torch.Tensor) -> None:
        inner.step()
        inner.zero_grad()

    return step


def by_data(parameter: Any) -> Callable[[torch.Tensor], None]:
    """As LOMO does."""

    def step(changed: torch.Tensor) -> None:
        changed.data.add_(changed.grad, alpha=-0.1)
        changed.grad = None

    return step


UPDATES = {  # and whether they raise versions
    "fused AdamW": (partial(stepping, partial(AdamW, lr=0.05, fused=True)), False),
    "foreach AdamW": (partial(stepping, partial(AdamW, lr=0.05, foreach=True)), True),
    "by data": (by_data, False),
}


def of_weights(module: RunsOut, mode: str = "loader", verify: bool = False) -> str:
    callback = AutoAccumulate(16, micro_batch_size=8, micro_batching=mode, verify=verify)
    return told(module, callback, samples=192, batch_size=8 if mode == "loader" else 16)[0]


@MODES
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_weights_that_are_updated_in_the_backward_pass(name: str, mode: str, verify: bool) -> None:
    """Where versions tell, a window that has updated some of them is not run again; else the warning names them."""
    update, raises_versions = UPDATES[name]
    for at, place in [(1, "last layer"), (2, "last layer"), (2, "forward"), (20, "last layer")]:
        module = InBackward(update, at=at, place=place)
        if raises_versions:
            with pytest.raises(UserError, match=r"of which no copies are made \(net.2.(weight|bias)\)"):
                of_weights(module, mode, verify)
        else:
            text = of_weights(module, mode, verify)
            assert f"(net.2.bias, net.2.weight) {LEFT}" in text
            assert SAME not in text


@pytest.mark.parametrize("name", UPDATES)
def test_a_window_that_fails_before_it_updates_weights_is_run_again(name: str) -> None:
    for at in (1, 19):
        text = of_weights(InBackward(UPDATES[name][0], at=at, place="forward"))
        assert f"(net.2.bias, net.2.weight) {LEFT}" in text


class Following(RunsOut):
    """A teacher that follows before the backward pass of every so many batches, as that of MoCo; it is in the loss."""

    seen: ClassVar[list[float]] = []  # of the teacher, by each attempt in training

    def __init__(self, by_data: bool, every: int, **trouble: Any) -> None:
        super().__init__(**trouble)
        self.teacher = torch.nn.Linear(FEATURES, 1, dtype=torch.float64).requires_grad_(False)
        torch.nn.init.ones_(self.teacher.weight)
        self.by_data, self.every = by_data, every
        self.seen.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(self.attempts, count):
            self.seen.append(float(self.teacher.weight.sum()))
        if batch_idx % self.every == self.every - 1:
            self.follow()
        return super().training_step(batch, batch_idx) + loss(self.net, batch[0], self.teacher(batch[0]))

    def follow(self) -> None:
        (self.teacher.weight.data if self.by_data else self.teacher.weight).mul_(0.9)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 20])
@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_a_teacher_that_the_check_saw_change_comes_back(by_data: bool, at: int) -> None:
    text = of_weights(Following(by_data, every=1, at=at), verify=True)
    assert Following.seen[at] == Following.seen[(at - 1) // 2 * 2]
    assert "changes teacher.weight, which the next micro-batch meets" in text
    assert LEFT not in text


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize(("at", "every"), [(1, 1), (1, 2), (2, 2), (3, 2), (20, 2)])
def test_a_teacher_that_nobody_saw_change_is_told(by_data: bool, at: int, every: int) -> None:
    """By its version the run ends; without one the warning names it. If it has not changed, all is well."""
    module = Following(by_data, every, at=at)
    if at % every:
        assert LEFT not in of_weights(module)
        assert Following.seen[at] == Following.seen[at - 1]
    elif by_data:
        assert f"(teacher.weight) {LEFT}" in of_weights(module)
    else:
        with pytest.raises(UserError, match=r"weights or buffers of which no copies are made \(teacher.weight\)"):
            of_weights(module)


class FollowingBetween(Following):
    """It follows after each batch instead."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


def test_a_teacher_that_a_hook_changes_within_a_window_is_told() -> None:
    assert LEFT not in of_weights(FollowingBetween(False, every=999, at=3))
    assert Following.seen[3] == Following.seen[2]
    text = of_weights(FollowingBetween(False, every=999, at=4))
    assert "A hook had changed teacher.weight since the window began" in text


# --- gradients ----------------------------------------------------------------------------------

BATCH, FACTOR, WINDOWS = 8, 2, 4
CUTS = pytest.mark.parametrize(("mode", "micro_batch"), [("loader", BATCH), ("step", BATCH), ("step", BATCH // 2)])
OF_WINDOWS = {"samples": BATCH * FACTOR * WINDOWS, "factor": FACTOR}


def decay(parameters: Any, factor: float = 0.5) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class ZeroedElsewhere(RunsOut):
    """Another hook does it."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad()


class Decaying(RunsOut):
    """Half of each gradient goes on to the next window."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        decay(self.parameters())


class BodyAlone(RunsOut):
    """Nobody zeroes the gradients of the last layer, and they count in the norm that is clipped."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


def cut(mode: str, micro_batch: int, verify: bool = False) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching=mode, verify=verify)


def close(found: torch.Tensor, program: Callable[..., RunsOut]) -> None:
    torch.testing.assert_close(found, train(program(0), **OF_WINDOWS), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("program", [ZeroedElsewhere, Decaying])
@CUTS
@pytest.mark.parametrize(
    ("window", "later", "place"), [(0, 0, "loss"), (0, 0, "last layer"), (0, 1, "loss"), (2, 0, "loss")]
)
def test_gradients_that_zeroing_leaves_are_told(
    program: Callable[..., RunsOut], mode: str, micro_batch: int, window: int, later: int, place: str
) -> None:
    """If there are none to leave, the window runs again with the same result."""
    callback, module = cut(mode, micro_batch), program(window * FACTOR * BATCH // micro_batch + later + 1, place)
    if place == "loss" and not later and (window == 0 or program is ZeroedElsewhere):
        close(told(module, callback, **OF_WINDOWS)[1], program)
    else:
        with pytest.raises(UserError, match="had changed gradients, in a way of its own to zero them, so it cannot"):
            train(module, callback, **OF_WINDOWS)


@CUTS
@pytest.mark.parametrize("verify", [False, True])
def test_gradients_that_no_optimizer_zeroes_are_named(mode: str, micro_batch: int, verify: bool) -> None:
    """And never is the result called the same; it is if they had not come yet."""
    passes = FACTOR * BATCH // micro_batch
    for at, place in [(1, "loss"), (1, "last layer"), (2, "loss"), (2 * passes + 1, "last layer")]:
        text, found = told(BodyAlone(at, place), cut(mode, micro_batch, verify), **OF_WINDOWS)
        if (at, place) == (1, "loss"):
            close(found, BodyAlone)
            assert LEFT not in text
        else:
            assert f"(net.2.bias.grad, net.2.weight.grad) {LEFT}." in text
            assert SAME not in text


class HalfZeroed(Decaying):
    """Memory runs out while gradients are zeroed for the third time, before those of a layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.zeroings, self.layer = count(1), layer

    def optimizer_zero_grad(self, *_: Any) -> None:
        zeroing = next(self.zeroings)
        for place in (0, 2):
            if zeroing == 3 and place == self.layer:
                self.fail()
            decay(self.net[place].parameters())


@pytest.mark.parametrize("layer", [0, 2])
def test_memory_that_runs_out_while_gradients_are_zeroed_ends_the_run(layer: int) -> None:
    with pytest.raises(UserError, match="had changed what hooks around the zeroing of gradients change"):
        train(HalfZeroed(layer), cut("loader", BATCH), **OF_WINDOWS)


# --- what users hang on a module ----------------------------------------------------------------

FAILS = 9
LARGE = 2**18 + 1  # numbers of a tensor that is not copied


class Holds(RunsOut):
    """Changes what it holds in every step, which runs out of memory after that once."""

    def __init__(self, fails: bool) -> None:
        super().__init__(FAILS if fails else 0, "forward")
        self.prepare()

    def look(self, predicted: torch.Tensor) -> None:
        self.change(predicted.detach().flatten().float())

    prepare: Callable[[], None]
    change: Callable[[torch.Tensor], None]
    read: Callable[[], dict[str, Any]]  # what is held, by the paths that a warning would use


class Arrays(Holds):
    def prepare(self) -> None:
        self.inplace, self.replaced, self.late = np.zeros(2), np.zeros(2), None
        self.by_name, self.rows = {"a": np.zeros(2)}, [np.zeros(2)]

    def change(self, values: torch.Tensor) -> None:
        array = values.double().numpy()
        self.inplace += array.sum()
        self.replaced = self.replaced + array.sum()
        self.late = array.max() * np.ones(1) if self.late is None else np.maximum(self.late, array.max())
        self.by_name["a"] += array.sum()
        self.rows[0] += array.sum()

    def read(self) -> dict[str, Any]:
        inner = {"by_name.a": self.by_name["a"], "rows.0": self.rows[0]}
        return {"inplace": self.inplace, "replaced": self.replaced, "late": self.late, **inner}


class Tensors(Holds):
    def prepare(self) -> None:
        self.sums, self.recent = {"a": torch.zeros(1), "nested": [torch.zeros(1)]}, deque(maxlen=1000)
        self.large, self.by_name = torch.zeros(LARGE), {"large": torch.zeros(LARGE)}
        self.rows: list[tuple[int, torch.Tensor]] = []
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("queue", torch.zeros(64))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def change(self, values: torch.Tensor) -> None:
        self.sums["a"] += values.sum()
        self.sums["nested"][0] = self.sums["nested"][0] + values.sum()
        self.large += values.sum()
        self.by_name["large"] += values.sum()
        self.recent.extend(values)
        self.rows.extend((1, value) for value in values)
        places = (self.place + torch.arange(len(values))) % 64
        self.queue[places] = values + torch.rand(len(values), generator=self.generator)
        self.place += len(values)

    def read(self) -> dict[str, Any]:
        rows, recent = torch.stack([row[1] for row in self.rows]), torch.stack([*self.recent])
        sums = {"sums.a": self.sums["a"], "sums.nested.0": self.sums["nested"][0]}
        large = {"large": self.large[0], "by_name.large": self.by_name["large"][0]}
        return {"recent": recent, "rows": rows, "queue": self.queue, "place": self.place, **sums, **large}


class Numbers(Holds):
    def prepare(self) -> None:
        self.place, self.losses, self.by_name, self.seen = 0, [], {"a": 0, "b": 1.0}, set()
        self.record, self.same, self.names = Counts(), 7, ["a", "b"]

    def change(self, values: torch.Tensor) -> None:
        self.place = (self.place + len(values)) % 64
        self.losses.append(float(values.mean()))
        self.by_name["a"] += len(values)
        self.seen.add(self.place + 100 * len(values))
        self.record.count += len(values)

    def read(self) -> dict[str, Any]:
        kept = {"same": self.same, "names": len(self.names), "by_name.b": self.by_name["b"]}
        counted = {"seen": len(self.seen), "losses": len(self.losses), "record.count": self.record.count}
        return {"place": self.place, "by_name.a": self.by_name["a"], **counted, **kept}


@dataclass
class Counts:
    """A number in a record."""

    count: int = 0


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("kind", [Arrays, Tensors, Numbers])
def test_what_a_step_gathers_comes_back_or_is_named(kind: Callable[[bool], Any], factor: int) -> None:
    """What is not named is as without the error, to the rounding of sums over halves."""
    ours, stock = kind(True), kind(False)
    text, _ = told(ours, AutoAccumulate(BATCH * factor, micro_batch_size=BATCH, verify=False), samples=96)
    train(stock, samples=96, factor=factor)
    names = re.search(rf"in attributes \((.*)\) {LEFT}", text)
    found, wanted = ours.read(), stock.read()
    assert set(names[1].split(", ")) == {name for name in wanted if differs(found[name], wanted[name])}


class Rotary(Holds):
    def prepare(self) -> None:
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.length = 0

    def change(self, values: torch.Tensor) -> None:
        self.length += 1 if len(values) == BATCH else 0
        self.table = torch.linspace(0.5, 1.0, self.length)


def test_a_table_and_the_length_beside_it_stay_together() -> None:
    """A table in a buffer that grows, and its length: the failed attempt has moved both."""
    ours = Rotary(True)
    told(ours, AutoAccumulate(BATCH, micro_batch_size=BATCH, verify=False), samples=96)
    assert (ours.length, len(ours.table)) == (FAILS - 1, FAILS - 1)  # from then on batches run in halves


def differs(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    except AssertionError:
        return True
    return False
