"""The rows of the fidelity table: what is trained, how it is cut, and what must come out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.networks import perceptron
from lightning_ga.plan.weights import TargetTokens

Precision = Literal["true", "bf16-mixed", "16-mixed", "bf16-true"]
Kind = Literal["sgd", "sparse_adam", "lbfgs", "lbfgs_strong_wolfe"]

FP64_TARGET = 1e-12
FP32_TARGET = 1e-6
WHOLE_TARGET = 2.0  # times the whole batch's own error
HALF_TARGETS = {"bf16-mixed": 2e-2, "16-mixed": 2e-3, "bf16-true": 1e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """One row. The last window of the epoch is measured, over all ranks."""

    name: str
    samples: int = 128
    effective: int = 128
    micro: int = 32
    factor: int = 4
    task: str = "samples"
    precision: Precision = "true"
    optimizer: Kind = "sgd"
    clip: float | None = None
    skip: Sequence[int] = ()
    ranks: int = 1
    fp32_target: float | None = FP32_TARGET
    targeted: bool = True

    def windows(self) -> list[list[int]]:
        kept = [index for index in range(self.samples) if index // self.micro not in self.skip]
        return [[*window] for _, window in groupby(kept, lambda index: index // self.effective)]


UNEQUAL: dict[str, Any] = {"micro": 43, "factor": 3}

CASES: tuple[Case, ...] = (
    Case("equal: 4×32"),
    Case("unequal: 43+43+42", **UNEQUAL),
    Case("ragged: 1 of 4", samples=128 + 32),
    Case("ragged: 2 of 4", samples=128 + 64),
    Case("ragged: 3 of 4", samples=128 + 96),
    Case("tokens: 4×4 sentences", task="tokens", samples=16, effective=16, micro=4),
    Case("skipped: 1 of 4", skip=(1,)),
    Case("DDP, shares 51+50", samples=101, effective=101, micro=26, factor=2, ranks=2),
    Case("bf16-mixed ᵃ", precision="bf16-mixed", **UNEQUAL),
    Case("fp16, GradScaler ᵃ", precision="16-mixed", **UNEQUAL),
    Case("bf16-true, 64×2", precision="bf16-true", micro=2, factor=64),
    Case("bf16-true, 1024×2", precision="bf16-true", samples=2048, effective=2048, micro=2, factor=1024),
    Case("SparseAdam ᵃ", task="sparse", optimizer="sparse_adam", **UNEQUAL),
    Case("clipping by norm ᵃ", clip=0.1, **UNEQUAL),
    Case("LBFGS ᵇ", optimizer="lbfgs", fp32_target=None, **UNEQUAL),
    Case("LBFGS strong Wolfe ᵇ", optimizer="lbfgs_strong_wolfe", **UNEQUAL),
    Case("(BatchNorm, 4×32)", task="batch norm", targeted=False),
)

LEGEND = """\
Relative error of the gradient that the optimizer sees to the whole batch's in
fp64, the worst of {draws} draws. Lightning, Accelerate and "ours fp64" compute in
fp64; "ours" and "whole" (one batch, no accumulation) in fp32. In the rows bf16
and fp16 all compute in that; in bf16-true the weights are bf16, in fp64 too.
ᵃ 43+43+42. ᵇ The same; the change of the parameters in one step of several
closure calls. BatchNorm, which no accumulation can get right, has no target."""

FEATURES, CLASSES = 32, 10
LENGTH, WORDS, VOCABULARY = 12, 50, 1000
IGNORED = -100  # what cross_entropy leaves out unless told otherwise

Columns = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """Data and network; functions of the seed alone."""

    draw: Callable[[int, torch.Generator], Columns]
    layers: Callable[[], nn.Module]
    seed: int
    normalize: Any = "samples"

    def network(self, seed: int, dtype: torch.dtype, held_in: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.layers().to(held_in).to(dtype)

    def rows(self, samples: int, seed: int, dtype: torch.dtype) -> TensorDataset:
        """Samples that are drawn in fp32, so that every precision sees the same numbers."""
        columns = self.draw(samples, torch.Generator().manual_seed(self.seed + seed))
        return TensorDataset(*(column.to(dtype) if column.is_floating_point() else column for column in columns))


def images(samples: int, generator: torch.Generator) -> Columns:
    """Features and a class that depends on them."""
    inputs = torch.randn(samples, FEATURES, generator=generator)
    noise = torch.randn(samples, CLASSES, generator=generator)
    return inputs, (inputs[:, :CLASSES] + noise).argmax(1)


def sentences(samples: int, generator: torch.Generator) -> Columns:
    """Words and targets; a sentence has 1 to 12 targets, the rest is padding."""
    words = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    return words, torch.where(torch.arange(LENGTH) < lengths, (words * 7 + 3) % WORDS, IGNORED)


def bags(samples: int, generator: torch.Generator) -> Columns:
    """A few words of a large vocabulary, and a class."""
    words = torch.randint(VOCABULARY, (samples, 4), generator=generator)
    return words, words.sum(1) % CLASSES


TASKS = {
    "samples": Task(images, lambda: perceptron((FEATURES, 64, CLASSES), nn.Tanh), 1000),
    "tokens": Task(
        sentences,
        lambda: nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS)),
        2000,
        normalize=TargetTokens(key=1),
    ),
    # An embedding with sparse gradients and nothing else: SparseAdam takes no dense ones.
    "sparse": Task(bags, lambda: nn.EmbeddingBag(VOCABULARY, CLASSES, sparse=True), 3000),
    "batch norm": Task(
        images,
        lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, CLASSES)),
        1000,
    ),
}
