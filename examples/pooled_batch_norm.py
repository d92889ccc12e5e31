"""Can more passes make BatchNorm exact under accumulation? ``python examples/pooled_batch_norm.py``

A small residual network trains on a window of 32 samples, cut in eight micro-batches. In the table, the error of its
gradient beside the gradient of one pass over the window: with the statistics of each micro-batch, and with statistics
that were pooled over the window in 1, 2, 3, … forward passes before.

Each pass makes the statistics of one more layer right. The gradient stays wrong even if all of them are, because
the statistics of the window depend on all of its samples, and a micro-batch's backward pass sees only its own.
"""

import torch
from torch import Tensor, nn

SAMPLES = 32
MICRO_BATCH = 4


class PooledBatchNorm(nn.Module):
    """Normalize by the statistics of this batch, or by given ones, and note those of this batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))
        self.given: tuple[Tensor, Tensor] | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, images: Tensor) -> Tensor:
        mean = images.mean((0, 2, 3), keepdim=True)
        square = (images * images).mean((0, 2, 3), keepdim=True)
        self.seen.append((mean.detach(), square.detach()))
        if self.given is not None:
            mean, square = self.given
        deviation = (square - mean * mean + 1e-5).sqrt()
        return (images - mean) / deviation * self.scale + self.shift


class Block(nn.Module):
    """Add two convolutions to what goes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            PooledBatchNorm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            PooledBatchNorm(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.layers(images))


def small_resnet() -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), PooledBatchNorm(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(stem, Block(8), Block(8), Block(8), head)


class Comparison:
    """One window, and the gradient of one pass over it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = small_resnet().double()
        brightness = torch.randn(SAMPLES, 1, 1, 1).double()
        self.images = torch.randn(SAMPLES, 3, 8, 8).double() + brightness
        self.labels = torch.randint(0, 10, (SAMPLES,))
        self.norms = [module for module in self.network.modules() if isinstance(module, PooledBatchNorm)]
        self.whole = self.gradient(SAMPLES)
        self.statistics = [norm.seen[0] for norm in self.norms]

    def run(self, size: int) -> None:
        """Run the window in micro-batches of this size, and add up their gradients."""
        self.network.zero_grad()
        for norm in self.norms:
            norm.seen.clear()
        for first in range(0, SAMPLES, size):
            scores = self.network(self.images[first : first + size])
            loss = nn.functional.cross_entropy(scores, self.labels[first : first + size])
            (loss * size / SAMPLES).backward()

    def gradient(self, size: int) -> Tensor:
        self.run(size)
        return torch.cat([weight.grad.flatten() for weight in self.network.parameters() if weight.grad is not None])

    def error(self) -> float:
        """Return how far the gradient of micro-batches is from that of the whole window."""
        difference = self.gradient(MICRO_BATCH) - self.whole
        return float(difference.norm() / self.whole.norm())

    def pool(self) -> None:
        """Give each layer the statistics that the window's micro-batches have in it now."""
        self.run(MICRO_BATCH)
        for norm in self.norms:
            means, squares = zip(*norm.seen, strict=True)
            norm.given = torch.stack(means).mean(0), torch.stack(squares).mean(0)

    def right_layers(self) -> int:
        """Count the layers whose given statistics are those of one pass."""
        count = 0
        for norm, (mean, square) in zip(self.norms, self.statistics, strict=True):
            assert norm.given is not None
            if torch.allclose(norm.given[0], mean) and torch.allclose(norm.given[1], square):
                count += 1
        return count


def main() -> None:
    comparison = Comparison()
    layers = len(comparison.norms)
    print(f"statistics of each micro-batch   error of the gradient {comparison.error():.2f}")
    for passes in range(1, layers + 1):
        comparison.pool()
        right = comparison.right_layers()
        error = comparison.error()
        print(f"pooled in {passes} passes, {right} of {layers} right   error of the gradient {error:.2f}")


if __name__ == "__main__":
    main()
