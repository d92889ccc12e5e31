"""Tasks in fp64, memory that runs out where it is told to, and the oracle: the same training in a stock Trainer.

What decides that memory runs out lies outside of the module, so that a second attempt looks like the first.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError
from lightning_ga.plan.exactness_verdicts import SAME_RESULT

FEATURES = 6
ROUNDING = 1e-12  # in fp64


class Memory(pl.Callback):
    """Runs out in chosen backward passes of training, counted from 1; keeps the gradient of every optimizer step."""

    in_use: "Memory | None" = None

    def __init__(self, *at: int) -> None:
        self.at, self.calls, self.armed = at, 0, False
        self.sizes: list[int] = []  # of each forward pass of training, failed ones too
        self.gradients: list[torch.Tensor] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.armed = True

    def on_train_batch_end(self, *_: Any) -> None:
        self.armed = False

    def backward(self) -> None:
        self.calls += self.armed
        if self.armed and self.calls in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self.gradients.append(torch.cat([gradient.detach().flatten().clone() for gradient in gradients]))


def touch(hidden: torch.Tensor, samples: int) -> torch.Tensor:
    """Use memory in a step of training: in backward when some gradients have been added."""
    memory = Memory.in_use
    if memory is not None:
        memory.sizes += [samples] if memory.armed else []
        if hidden.requires_grad:
            hidden.register_hook(lambda _: memory.backward())
    return hidden


class Task(pl.LightningModule):
    """A loss of a task and a batch on a small network, by SGD; without a loss, a regression.

    ``state`` are buffers, submodules and other attributes besides.
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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.regression(*batch) if self.own is None else self.own(self, batch)

    def regression(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.predict(inputs), targets)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.net[1](self.net[0](inputs))
        return self.net[2](touch(hidden, len(inputs)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def network(inputs: int = FEATURES, outputs: int = 1) -> torch.nn.Sequential:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(inputs, 7), torch.nn.Tanh(), torch.nn.Linear(7, outputs)).double()


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of a regression: (features,) and (1,)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return list(zip(inputs, targets))


def of_pairs(samples: int = 48, batch: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(pairs(samples), batch_size=batch, **settings)


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
        self.second_step(weights, moves)
        return value

    def second_step(self, weights: Any, moves: Any) -> None:
        torch._foreach_sub_(weights, moves)
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=-0.1)


# --- fits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What came of a fit."""

    module: Any
    trainer: pl.Trainer
    callback: Any
    memory: Memory
    told: list[str] = field(default_factory=list)  # warnings about exactness
    ran_out: list[str] = field(default_factory=list)  # warnings about memory that ran out

    @property
    def gradients(self) -> list[torch.Tensor]:
        return self.memory.gradients

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
    memory = Memory() if memory is None else memory
    trainer = quiet_trainer(*callbacks, memory, **{"max_epochs": 1, **settings})
    callback = next((c for c in callbacks if isinstance(c, AutoAccumulate)), None)
    done = Trained(module, trainer, callback, memory)
    torch.manual_seed(7)
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
        elif text.startswith("Memory ran out"):
            done.ran_out.append(text)
        else:
            warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)
    return done


@dataclass(frozen=True)
class Way:
    """Where batches are to be cut, and whether they come to be cut by an error of memory in the first."""

    mode: Any
    fails: bool = False

    def callback(self, batch: int, micro: int, **arguments: Any) -> AutoAccumulate:
        return AutoAccumulate(micro_batch_size=batch if self.fails else micro, micro_batching=self.mode, **arguments)

    def memory(self) -> Memory:
        return Memory(*[1] * self.fails)


LOADER, STEP = Way("loader"), Way("step")
OOM, OOM_STEP = Way("loader", fails=True), Way("step", fails=True)
WAYS = {"loader": LOADER, "step": STEP, "oom in step mode": OOM_STEP, "oom": OOM}


def each(*labels: str) -> Any:
    """One test for each way."""
    return pytest.mark.parametrize("way", [WAYS[label] for label in labels], ids=labels)


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


def one_pass(case: Case, **settings: Any) -> Trained:
    """The oracle: stock Lightning."""
    return train(case.module(), case.loader(), **settings)


def error(ours: Trained, oracle: Trained) -> float:
    """Relative error of the first gradient, or of the weights in the end if that is larger."""
    assert len(ours.gradients) == len(oracle.gradients), "another number of optimizer steps"
    both = (ours.gradients[0], oracle.gradients[0]), (ours.weights, oracle.weights)
    return max(float((mine - right).norm() / right.norm()) for mine, right in both)


def cut_rightly(case: Case, way: Way, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Trained:
    """Assert that the case is cut, trains as in one pass, and that this is what is said of it."""
    ours, oracle = run(case, way, arguments=arguments, **settings), one_pass(case, **settings)
    assert error(ours, oracle) <= ROUNDING
    assert (ours.cause, ours.told) == ("exact", [])
    assert ours.callback.oom_events == len(ours.ran_out) == way.fails
    assert all(SAME_RESULT in text for text in ours.ran_out)
    assert min(ours.memory.sizes) < min(oracle.memory.sizes)
    return ours


def told(case: Case, way: Way, cause: str, words: str = "", **settings: Any) -> Trained:
    """Assert that the case trains otherwise than in one pass, and that this is said once, with its cause and words."""
    ours = run(case, way, **settings)
    assert error(ours, one_pass(case, **settings)) > 1e-4
    assert ours.cause == cause
    (text,) = ours.ran_out if way.fails else ours.told
    assert re.search(words, text), text
    assert SAME_RESULT not in text
    return ours


def refused(case: Case, way: Way, *words: str, **settings: Any) -> UserError:
    """Assert that a fit ends in a sentence with these words; return the error."""
    with pytest.raises(UserError) as caught:
        run(case, way, **settings)
    missing = [word for word in words if not re.search(word, str(caught.value), re.IGNORECASE)]
    assert not missing, f"{missing} not in: {caught.value}"
    return caught.value
