"""A model whose gradient is what each sample weighs in the optimizer's step."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Weights = list[list[float]]


class Numbers(Dataset[int]):
    """Samples that are their own numbers; ``repeated`` of them come a second time, at the end."""

    def __init__(self, size: int, repeated: int = 0) -> None:
        self.numbers = [*range(size), *range(repeated)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


class SampleWeights(pl.LightningModule):
    """Its loss is the mean of one parameter for each sample, so that a sample's gradient is what it weighs.

    The first rank writes the gradient of each window to a file; the parameters stay as they are.
    """

    def __init__(self, size: int, record: Path) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.ones(size, dtype=torch.float64))
        self.record = record
        self.windows: Weights = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.parameter[batch].mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.parameter.grad is not None
        self.windows.append(self.parameter.grad.tolist())

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.record.write_text(json.dumps(self.windows))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def weights(
    numbers: Numbers, *callbacks: pl.Callback, batch_size: int, drop_last: bool = False, **trainer: Any
) -> Weights:
    """Train an epoch, and read what each sample weighs in each window.

    Args:
        numbers: The samples.
        *callbacks: Of the Trainer.
        batch_size: Of the loader.
        drop_last: Of the loader.
        **trainer: Further arguments of the Trainer.
    """
    with TemporaryDirectory() as folder:
        record = Path(folder) / "windows.json"
        pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **trainer,
        ).fit(
            SampleWeights(max(numbers.numbers) + 1, record),
            DataLoader(numbers, batch_size=batch_size, shuffle=True, drop_last=drop_last),
        )
        found: Weights = json.loads(record.read_text())
    return found


def in_words(window: list[float]) -> str:
    """What the samples of a window weigh, as multiples of the same share for each.

    Examples:
        >>> in_words([0.25, 0.25, 0.0, 0.25, 0.25]), in_words([0.125, 0.25])
        ('4 samples: 1.000', '2 samples: 0.250 to 0.500')
    """
    taken = [weight for weight in window if weight]
    fair = [f"{weight * len(taken):.3f}" for weight in (min(taken), max(taken))]
    return f"{len(taken)} samples: {' to '.join(dict.fromkeys(fair))}"
