"""The training step that every program runs, and the one place where steps and errors are counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from benchmarks.probing.models import POOL, Model, Samples
from benchmarks.trainers import cross_entropy
from lightning_ga import is_out_of_memory


class Counter:
    """Counts the training steps of a program, and the out-of-memory errors that they raised."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ooms = 0

    @contextmanager
    def step(self, size: int) -> Iterator[None]:
        """Around one training step: forward, backward and optimizer."""
        self.sizes.append(size)
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.ooms += 1
            # Lightning 2.6.6 looks for these words. What the error pins stays pinned, as on a GPU.
            if "CUDA" not in str(error):
                error.args = (f"CUDA out of memory. {error}",)
            raise

    def counts(self) -> dict[str, int]:
        """Sizes tried one after another, steps and errors.

        Examples:
            >>> counter = Counter()
            >>> counter.sizes += [2, 2, 2, 4, 2]
            >>> counter.counts()
            {'trials': 3, 'steps': 5, 'ooms': 0}
        """
        return {"trials": len([*groupby(self.sizes)]), "steps": len(self.sizes), "ooms": self.ooms}


class Training:
    """A model with Adam, and a batch of any size from a few samples."""

    def __init__(self, model: Model, device: torch.device | str = "cpu") -> None:
        torch.manual_seed(0)
        self.counter = Counter()
        with torch.device(device):
            self.net = model.build().train()
            self.samples = model.samples()
        self.optimizer = torch.optim.Adam(self.net.parameters(), foreach=True)

    def loss(self, size: int) -> Tensor:
        return cross_entropy(self.net, *self.batch(size))

    def batch(self, size: int) -> Samples:
        index = torch.arange(size, device=self.samples[0].device) % POOL
        return tuple(tensor[index] for tensor in self.samples)

    def step(self, size: int) -> None:
        with self.counter.step(size):
            loss = self.loss(size)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def resident(self) -> Iterator[Tensor | None]:
        yield from self.samples
        yield from self.net.buffers()
        for parameter in self.net.parameters():
            yield from (parameter, parameter.grad)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class Oracle(Training):
    """Stands for a training whose limit is known: runs out of memory above it, and computes nothing."""

    def __init__(self, limit: int) -> None:
        super().__init__(Model(lambda: nn.Linear(1, 1), lambda: (torch.zeros(1), torch.zeros(1))))
        self.limit = limit

    def loss(self, size: int) -> Tensor:
        if size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {size} samples are more than {self.limit}.")
        return self.net(torch.ones(1)).sum()
