"""What one window of training takes, in a plain loop: memory, processor time, and its gradient."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ga.testing import limit_memory

Batch = tuple[Tensor, Tensor] | list[Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
NO_LIMIT = "1TiB"
TIMED = 16384  # samples
MIB = 2**20


def random_batch(samples: int, shape: Sequence[int]) -> Batch:
    """Draw images of a shape ``(channels, height, width)`` and classes from 0 to 9."""
    return torch.rand(samples, *shape), torch.randint(10, (samples,))


def train_window(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, sizes: Sequence[int]) -> None:
    """Take one optimizer step over a batch that is cut into micro-batches of these sizes.

    Args:
        net: Maps images to logits.
        optimizer: Of its parameters.
        batch: Images and classes of the window.
        sizes: Samples of each micro-batch.
    """
    images, targets = batch
    optimizer.zero_grad()
    for inputs, classes in zip(images.split(list(sizes)), targets.split(list(sizes))):
        loss = cross_entropy(net(inputs), classes)  # a mean over the micro-batch
        (loss * (len(classes) / len(targets))).backward()
    optimizer.step()


def window_peak(
    net: nn.Module,
    make_optimizer: MakeOptimizer,
    sizes: Sequence[int],
    shape: Sequence[int],
    *,
    budget: int | str = NO_LIMIT,
) -> float:
    """Measure the most MiB of live tensors in the second window, when the optimizer has its state.

    Weights, gradients, optimizer state and activations count; the batch does not.

    Args:
        net: Maps images to logits.
        make_optimizer: Takes its parameters.
        sizes: Samples of each micro-batch.
        shape: Of an image.
        budget: More than this raises ``torch.OutOfMemoryError``.
    """
    torch.manual_seed(0)
    optimizer = make_optimizer(net.parameters())
    batch = random_batch(sum(sizes), shape)
    with limit_memory(budget, resident=list(net.parameters())) as memory:
        for _ in range(2):
            train_window(net, optimizer, batch, sizes)
    return memory.peak_bytes / MIB


def sample_cost(net: nn.Module, make_optimizer: MakeOptimizer, sizes: Sequence[int], shape: Sequence[int]) -> float:
    """Measure the processor time of training per sample in µs: the least of several windows.

    Args:
        net: Maps images to logits.
        make_optimizer: Takes its parameters.
        sizes: Samples of each micro-batch.
        shape: Of an image.
    """
    torch.manual_seed(0)
    optimizer = make_optimizer(net.parameters())
    batch = random_batch(sum(sizes), shape)
    train_window(net, optimizer, batch, sizes)
    seconds = []
    for _ in range(max(5, TIMED // sum(sizes))):
        started = time.process_time()
        train_window(net, optimizer, batch, sizes)
        seconds.append(time.process_time() - started)
    return min(seconds) / sum(sizes) * 1e6


def gradient_share(net: nn.Module, window: Sequence[Batch]) -> float:
    """Measure how much of the window's mean gradient the optimizer is given: 1 is right.

    The gradient that has accumulated is projected on that of one pass over all samples of the window.

    Args:
        net: Maps images to logits; its gradients have accumulated.
        window: The micro-batches that did it.
    """
    parameters = list(net.parameters())
    images, targets = (torch.cat(parts) for parts in zip(*window))
    right = torch.autograd.grad(cross_entropy(net(images), targets), parameters)
    pairs = [(parameter.grad, mean) for parameter, mean in zip(parameters, right) if parameter.grad is not None]
    along = sum(float((found * mean).sum()) for found, mean in pairs)
    return along / sum(float(mean.square().sum()) for mean in right)


@torch.no_grad()
def evaluated(net: nn.Module, batches: Iterable[Batch]) -> tuple[float, float]:
    """Measure loss and accuracy over all samples, in the mode in which the network is."""
    loss, right, samples = 0.0, 0, 0
    for images, targets in batches:
        logits = net(images)
        loss += cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(dim=1) == targets).sum())
        samples += len(targets)
    return loss / samples, right / samples


def cut_text(chunks: Iterable[int]) -> str:
    """Write the micro-batches of a window.

    Examples:
        >>> cut_text([32]), cut_text([8, 8]), cut_text([11, 11, 10])
        ('32', '8 × 2', '11 × 2 + 10')
    """
    runs = [(size, len(list(same))) for size, same in groupby(chunks)]
    return " + ".join(f"{size} × {count}" if count > 1 else str(size) for size, count in runs)
