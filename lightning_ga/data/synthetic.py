"""Generated pictures of any size and number: for trying out memory and speed, and for tests."""

from typing import Any

import torch

from lightning_ga.data.images import ImageData, Labelled, Splits

AT_ONCE = 1024  # pictures that are drawn in 32 bits at a time


class Synthetic(ImageData):
    """Each class is a random pattern; its samples are the pattern under noise.

    Args:
        samples: Training samples; validation and test sets of a quarter of that are added.
        noise: Share of noise in a picture, 0 to 1.
        **arguments: See :class:`ImageData`; ``split_seed`` seeds the pictures too.
    """

    name = "synthetic"

    def __init__(self, *, samples: int = 1024, noise: float = 0.5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.samples, self.noise = samples, noise
        self.num_classes = self.num_classes or 10

    def read(self) -> Splits:
        """Draw the patterns, then the samples."""
        generator = torch.Generator().manual_seed(self.split_seed)
        shape = (self.channels, self.image_size, self.image_size)
        assert self.num_classes is not None
        patterns = torch.randint(256, (self.num_classes, *shape), generator=generator, dtype=torch.uint8)
        held_out = max(1, self.samples // 4)
        return Splits(*(self._draw(count, patterns, generator) for count in (self.samples, held_out, held_out)))

    def _draw(self, count: int, patterns: torch.Tensor, generator: torch.Generator) -> Labelled:
        labels = torch.arange(count) % len(patterns)
        images = torch.empty(count, *patterns.shape[1:], dtype=torch.uint8)
        for part, classes in zip(torch.split(images, AT_ONCE), torch.split(labels, AT_ONCE)):
            noise = torch.randint(256, part.shape, generator=generator, dtype=torch.uint8)
            part.copy_(torch.lerp(patterns[classes].float(), noise.float(), self.noise))
        return Labelled(images, labels)
