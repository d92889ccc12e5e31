"""Counts of windows, and the gradients that their micro-batches have."""

import torch
from hypothesis import strategies as st

# The counts of a window: one list per rank, all of the same length.
COUNTS = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 60), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def gradient_of(count: int, place: int) -> torch.Tensor:
    """The gradients of ``count`` samples, one a row: a function of the place alone."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(place), dtype=torch.float64)


def means_and_all(counts: list[list[int]]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The mean gradient of each micro-batch, as its loss gives it, and that of all samples."""
    samples = [[gradient_of(n, 10 * rank + i) for i, n in enumerate(row)] for rank, row in enumerate(counts)]
    means = [[g.mean(0) if len(g) else torch.zeros(3, dtype=torch.float64) for g in row] for row in samples]
    return means, torch.cat([g for row in samples for g in row]).mean(0)


def seen_by_the_optimizer(means: list[list[torch.Tensor]], weights: list[list[float]], factor: int) -> torch.Tensor:
    """What Lightning and data parallelism make of it: losses ÷ factor, gradients averaged over ranks."""
    ranks = [sum(w * g / factor for w, g in zip(*row)) for row in zip(weights, means)]
    return torch.stack(ranks).mean(0)  # type: ignore[arg-type]
