"""What the tests of ``test_true_*.py`` share: tasks in fp64, memory that runs out where it is told to, and the oracle.

The oracle of all of them is the same training in one pass: the same module and loader in a Trainer without the
callback. What decides that memory runs out lies outside of the module, so that a second attempt looks like the first.
"""

import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from reference import quiet_trainer
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError
from lightning_ga.memory.oom import is_out_of_memory

FEATURES = 6
ROUNDING = 1e-12  # in fp64


class Memory:
    """Runs out at chosen calls of ``touch``, counted from 1 for each place, or above a number of samples."""

    in_use: "Memory | None" = None

    def __init__(self, *at: int, place: str = "backward", above: int | None = None) -> None:
        self.at, self.place, self.above = at, place, above
        self.calls: dict[str, int] = {}
        self.sizes: list[int] = []  # of each forward pass of training, failed ones too
        self.armed = False

    def touch(self, place: str, samples: int) -> None:
        self.calls[place] = self.calls.get(place, 0) + 1
        if place == "forward":
            self.sizes.append(samples)
        if place == self.place and (self.calls[place] in self.at or samples > (self.above or samples)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def touch(place: str, samples: int) -> None:
    """Use memory in a step; no more than noted outside of training (probe, exactness check)."""
    memory = Memory.in_use
    if memory is not None and memory.armed:
        memory.touch(place, samples)


class Observer(pl.Callback):
    """Keeps the gradient of every optimizer step, and tells memory when training goes on."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if Memory.in_use is not None:
            Memory.in_use.armed = True

    def on_train_batch_end(self, *_: Any) -> None:
        if Memory.in_use is not None:
            Memory.in_use.armed = False

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(flat_gradient(module))


class Task(pl.LightningModule):
    """A loss of one's own on a small network, by SGD.

    Args:
        own: The loss of a task and a batch; without one that of a regression.
        state: Buffers, submodules and other attributes besides.
    """

    def __init__(self, own: Any = None, *, inputs: int = FEATURES, outputs: int = 1, **state: Any) -> None:
        super().__init__()
        self.net = network(inputs, outputs)
        self.own = own
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        if self.own is not None:
            return self.own(self, batch)
        return self.regression(*batch)

    def regression(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.predict(inputs), targets)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.net[1](self.net[0](inputs))
        return self.net[2](self.used(hidden, len(inputs)))

    def used(self, hidden: torch.Tensor, samples: int) -> torch.Tensor:
        """Memory may run out here, in forward, and in backward when some gradients have been added."""
        touch("forward", samples)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: touch("backward", samples))
        return hidden

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def network(inputs: int = FEATURES, outputs: int = 1) -> torch.nn.Sequential:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(inputs, 7), torch.nn.Tanh(), torch.nn.Linear(7, outputs)).double()


def pairs(count: int, features: int = FEATURES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of a regression: (features,) and (1,)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, features, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return list(zip(inputs, targets))


def flat_gradient(module: torch.nn.Module) -> torch.Tensor:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.detach().flatten().clone() for p in parameters]
    )


@dataclass(frozen=True)
class Trained:
    """What came of a fit."""

    module: Any
    trainer: pl.Trainer
    callback: Any
    gradients: list[torch.Tensor]
    memory: Memory
    told: list[str] = field(default_factory=list)  # warnings about exactness
    ran_out: list[str] = field(default_factory=list)  # warnings about memory that ran out

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])

    @property
    def cause(self) -> str:
        cause: str = self.callback.exactness.cause
        return cause


def train(
    module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, memory: Memory | None = None, **settings: Any
) -> Trained:
    """Fit for an epoch; what the package warns of is kept, what others warn of is an error as everywhere."""
    observer = Observer()
    memory = Memory() if memory is None else memory
    trainer = quiet_trainer(*callbacks, observer, **{"max_epochs": 1, **settings})
    callback = next((c for c in callbacks if isinstance(c, AutoAccumulate)), None)
    done = Trained(module, trainer, callback, observer.gradients, memory)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    Memory.in_use = memory
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader)
    finally:
        Memory.in_use = None
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, ExactnessWarning):
            done.told.append(text)
        elif "ran out" in text:
            assert issubclass(warning.category, UserWarning)
            done.ran_out.append(text)
        else:
            warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)
    return done


# --- ways to cut a batch ------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a batch comes to be cut."""

    mode: str
    fails: bool = False  # memory runs out in the first batch, which is whole

    def callback(self, batch: int, micro: int, **arguments: Any) -> AutoAccumulate:
        return AutoAccumulate(micro_batch_size=batch if self.fails else micro, micro_batching=self.mode, **arguments)

    def memory(self, place: str = "backward") -> Memory:
        return Memory(1, place=place) if self.fails else Memory()


LOADER, STEP = Way("loader"), Way("step")
OOM, OOM_STEP = Way("loader", fails=True), Way("step", fails=True)
WAYS = {"loader": LOADER, "step": STEP, "oom": OOM, "oom in step mode": OOM_STEP}


def each(*labels: str) -> Any:
    """One test for each way."""
    return pytest.mark.parametrize("way", [WAYS[label] for label in labels], ids=labels)


each_way = each("loader", "step", "oom")
each_cut = each("loader", "step")
each_cut_in_step = each("step", "oom")
each_oom = each("oom", "oom in step mode")


def by_turns(values: Iterable[Any], *, fails: bool = True, name: str = "name") -> Any:
    """Tests of each value: cut by the loader or in the step by turns, and after an error in the other mode.

    Args:
        fails: Also after an error.
    """
    turns = itertools.cycle([("loader", "oom in step mode"), ("step", "oom")])
    rows = [
        pytest.param(value, WAYS[label], id=f"{value}-{label}", marks=[pytest.mark.slow] * WAYS[label].fails)
        for value, labels in zip(values, turns)
        for label in (labels if fails else labels[:1])
    ]
    return pytest.mark.parametrize((name, "way"), rows)


def of_pairs(samples: int = 48, batch: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(pairs(samples), batch_size=batch, **settings)


@dataclass(frozen=True)
class Case:
    """A module, its loader, and how its batches are cut."""

    module: Callable[[], pl.LightningModule] = Task
    loader: Callable[[], Any] = of_pairs
    batch: int = 8
    micro: int = 3


def run(case: Case, way: Way, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Trained:
    """A fit of the case in that way."""
    callback = way.callback(case.batch, case.micro, **(arguments or {}))
    return train(case.module(), case.loader(), callback, memory=way.memory(), **settings)


@dataclass(frozen=True)
class Stock:
    """What is left of the oracle; the trainer is not kept, as all that lives is looked through in each trial."""

    gradients: list[torch.Tensor]
    weights: torch.Tensor
    memory: Memory


@cache
def one_pass(case: Case, **settings: Any) -> Stock:
    """The oracle: stock Lightning, run once for all ways to cut the batches of a case."""
    done = train(case.module(), case.loader(), **settings)
    return Stock(done.gradients, done.weights, done.memory)


def error(ours: Trained, oracle: Trained | Stock) -> float:
    """Relative error of the first gradient, or of the weights in the end if that is larger."""
    assert len(ours.gradients) == len(oracle.gradients), "another number of optimizer steps"
    both = (ours.gradients[0], oracle.gradients[0]), (ours.weights, oracle.weights)
    return max(float((mine - right).norm() / right.norm()) for mine, right in both)


def cut_rightly(case: Case, way: Way, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Trained:
    """Assert that the case trains as in one pass, and that this is what is said of it."""
    ours, oracle = run(case, way, arguments=arguments, **settings), one_pass(case, **settings)
    assert error(ours, oracle) <= ROUNDING
    assert ours.cause == "exact" or (ours.cause == "unmeasured" and case.micro == 1)
    assert ours.told == []
    assert ours.callback.oom_events == len(ours.ran_out) == (1 if way.fails else 0)
    assert all("with the same result" in text for text in ours.ran_out) or ours.cause != "exact"
    assert min(ours.memory.sizes) < min(oracle.memory.sizes)
    return ours


def told(
    case: Case, way: Way, cause: str, words: str = "", *, arguments: dict[str, Any] | None = None, **settings: Any
) -> Trained:
    """Assert that the case trains otherwise than in one pass, and that this is said, with its cause and these words.

    Once, before training or within it; after an error of memory in what is said of that.
    """
    ours = run(case, way, arguments=arguments, **settings)
    assert error(ours, one_pass(case, **settings)) > 1e-4
    assert ours.cause in cause.split("|")
    texts = ours.told or ours.ran_out
    assert len(texts) == 1
    assert re.search(words, texts[0], re.IGNORECASE), texts[0]
    assert ours.told or "with the same result" not in texts[0]
    return ours


def told_or_right(case: Case, way: Way) -> None:
    """Assert that the case is refused with its way out, or trained as in one pass: never wrongly in silence."""
    try:
        ours = run(case, way)
    except UserError as refused:
        assert "split_batch" in str(refused)  # noqa: PT017
        return
    wrong = error(ours, one_pass(case)) > ROUNDING
    assert not wrong or (ours.cause != "exact" and (ours.told or ours.ran_out))
    assert not wrong or "same result" not in " ".join(ours.ran_out)


def refused(case: Case, way: Way, *words: str, **settings: Any) -> UserError:
    """Assert that a fit ends in a sentence with these words; return the error."""
    with pytest.raises(UserError) as caught:
        run(case, way, **settings)
    missing = [word for word in words if not re.search(word, str(caught.value), re.IGNORECASE)]
    assert not missing, f"{missing} not in: {caught.value}"
    return caught.value


def comes_from_memory(failure: BaseException) -> bool:
    """Whether an error was raised from the one of memory."""
    return failure.__cause__ is not None and is_out_of_memory(failure.__cause__)


def parts_of_at_most(texts: Sequence[str]) -> int:
    """What a warning says of the size of parts."""
    (text,) = texts
    found = re.search(r"in parts of at most (\d+)", text)
    assert found, text
    return int(found[1])


# --- one loss for each verdict -----------------------------------------------------------------


def normalized() -> Task:
    norm = torch.nn.BatchNorm1d(FEATURES).double()
    return Task(lambda task, batch: task.regression(task.norm(batch[0]), batch[1]), norm=norm)


def contrastive(task: Task, batch: Any) -> torch.Tensor:
    views = torch.stack([task.predict(batch[0]), task.predict(batch[0] + batch[1])])[:, :, 0]
    return cross_entropy(torch.outer(*views), torch.arange(len(views[0])))


def summed(task: Task, batch: Any) -> torch.Tensor:
    return 0.01 * mse_loss(task.predict(batch[0]), batch[1], reduction="sum")


def class_weighted(task: Task, batch: Any) -> torch.Tensor:
    weight = torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)
    classes = (batch[0][:, 0] * 10).long() % 3
    return cross_entropy(task.predict(batch[0]), classes, weight)


def queued() -> Task:
    """The loss looks at a queue of earlier samples, which the step fills."""

    def loss(task: Task, batch: Any) -> torch.Tensor:
        predicted = task.predict(batch[0])
        value = mse_loss(predicted, batch[1]) + (predicted @ task.queue.T).logsumexp(1).mean()
        task.queue = torch.cat([task.queue[len(predicted) :], predicted.detach()])
        return value

    return Task(loss, queue=torch.linspace(-1, 1, 24, dtype=torch.float64).view(24, 1))


VERDICTS: dict[str, tuple[str, Callable[[], pl.LightningModule], str]] = {
    "BatchNorm": ("batch_norm", normalized, r"BatchNorm"),
    "a sum over samples": ("sum", lambda: Task(summed), "sum"),
    "in-batch negatives": ("coupled", lambda: Task(contrastive), "coupl|compar|each other"),
    "class weights": ("weighted", lambda: Task(class_weighted, outputs=3), "weight|mean over"),
    "a queue": ("stateful", queued, "queue"),
}
"""By what a program does: the cause, the program, and what is said of it."""

# --- optimizers ---------------------------------------------------------------------------------


class Sharpness(torch.optim.Optimizer):
    """SAM: the gradient is that of weights a little further up."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        evaluate: Callable[[], Any] = torch.enable_grad()(closure)
        value = evaluate()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        moves = [0.5 * weight.grad for weight in weights]
        torch._foreach_add_(weights, moves)
        evaluate()
        torch._foreach_sub_(weights, moves)
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=-0.1)
        return value
