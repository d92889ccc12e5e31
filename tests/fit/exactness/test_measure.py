"""Which samples the check takes, and in which state it cuts them."""

from pathlib import Path
from typing import Any

import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.fit.exactness.measure import SAMPLES, telling_samples


class Noting(Regression):
    """Notes the size of every batch in a file, as what the code keeps in memory is put back."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{len(batch[0])}\n")
        return super().training_step(batch, batch_idx)


def test_the_check_takes_as_many_samples_as_its_description_says(tmp_path: Path) -> None:
    module, loader = Noting(tmp_path / "sizes"), DataLoader(Samples(32), batch_size=16)
    fit(loader, AutoAccumulate(micro_batch_size=16), module=module, max_epochs=1)
    assert {int(size) for size in module.path.read_text().split()} == {16, SAMPLES, 3, 2, 4}
    assert SAMPLES == 5
    assert "on up to five samples" in " ".join(AutoAccumulate.__doc__.split())


def test_samples_that_differ_are_chosen() -> None:
    labels = [torch.tensor(label) for label in (0, 0, 0, -100, 1, 0)]
    samples = [(torch.zeros(3), label) for label in labels] + [(torch.zeros(7), labels[0])]
    chosen = telling_samples(samples, 4)
    assert [(len(inputs), int(label)) for inputs, label in chosen] == [(7, 0), (3, 0), (3, -100), (3, 1)]
    assert telling_samples(samples[:2], 4) == samples[:2]


class Prepared(Regression):
    """A hook of the transfer that uses a weight of the model."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        weight = next(self.parameters()).detach().mean()
        return batch[0] * (1 + weight), *batch[1:]


def test_batches_are_moved_with_the_weights_that_they_are_compared_with() -> None:
    callback = AutoAccumulate(micro_batch_size=4, micro_batching="step")
    fit(DataLoader(Samples(24), batch_size=12), callback, module=Prepared(), max_epochs=1)
    assert callback.exactness.cause == "exact"
    assert callback.exactness.relative_error <= 1e-12
