"""The models whose limits are searched for, and the training step that every program runs and that counts itself."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import timm
import torch
from torch import Tensor, nn

from benchmarks.networks import CausalBlocks, perceptron
from benchmarks.trainers import cross_entropy
from lightning_ga import is_out_of_memory

CLASSES, WORDS, LENGTH = 10, 256, 128
POOL = 8  # distinct samples that batches are filled with

Samples = tuple[Tensor, ...]


class GPT(nn.Module):
    """A small language model: words ``(batch, length)`` to logits ``(batch, length, words)``."""

    def __init__(self, *, naive: bool, layers: int = 8, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = CausalBlocks(width, heads, layers, naive=naive)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.words(words) + self.positions))
        return logits


def vit() -> nn.Module:
    """Twelve layers on 144 patches; narrow, so that steps of 2 GiB are cheap on a CPU."""
    return timm.models.VisionTransformer(
        img_size=96, patch_size=8, embed_dim=96, depth=12, num_heads=3, num_classes=CLASSES
    )


def mlp() -> nn.Module:
    """Wide inputs, narrow layers: a sample takes little, so that limits are in the thousands."""
    return nn.Sequential(nn.Flatten(), *perceptron((3 * 128 * 128, 64, 64, CLASSES), nn.ReLU))


def images(size: int) -> Samples:
    return torch.randn(POOL, 3, size, size), torch.arange(POOL) % CLASSES


def sentences() -> Samples:
    drawn = torch.randint(WORDS, (POOL, LENGTH + 1))
    return drawn[:, :-1], drawn[:, 1:]


@dataclass(frozen=True, slots=True)
class Model:
    build: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    peers_to_gib: float = 2
    quick_gib: float = 0.25


resnet = partial(timm.create_model, "resnet34d", num_classes=CLASSES)  # with Adam, most of a small budget

MODELS = {
    "resnet34d 32": Model(resnet, partial(images, 32), peers_to_gib=0.5, quick_gib=0.4),
    "resnet34d 224": Model(resnet, partial(images, 224), peers_to_gib=0.5, quick_gib=0.5),
    "ViT": Model(vit, partial(images, 96), peers_to_gib=1),
    "GPT, SDPA": Model(partial(GPT, naive=False), sentences),
    "GPT, naive": Model(partial(GPT, naive=True), sentences),
    "MLP": Model(mlp, partial(images, 128)),
}


def runs(step: Callable[[], object]) -> bool:
    """Tell whether something runs within the memory; if it does not, free what its error keeps alive.

    Examples:
        >>> def too_large():
        ...     raise torch.OutOfMemoryError
        >>> runs(list), runs(too_large)
        (True, False)
    """
    try:
        step()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # behind the block, because within it the traceback keeps activations alive
    torch.cuda.empty_cache()
    return False


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
    """A training whose limit is known: it raises an out-of-memory error above the limit, and computes nothing."""

    def __init__(self, limit: int) -> None:
        super().__init__(Model(lambda: nn.Linear(1, 1), lambda: (torch.zeros(1), torch.zeros(1))))
        self.limit = limit

    def loss(self, size: int) -> Tensor:
        if size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {size} samples are more than {self.limit}.")
        return self.net(torch.ones(1)).sum()
