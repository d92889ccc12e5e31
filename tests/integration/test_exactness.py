"""Same optimizer steps and same gradients as the recipe run whole, however the data are given."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from reference import (
    Samples,
    Validated,
    cut,
    fit,
    plain_loop,
    worst_error,
)
from torch.utils.data import (
    DataLoader,
    Sampler,
    WeightedRandomSampler,
)

from lightning_ga import AutoAccumulate

EPOCHS = 2


class Batches:
    """Any iterable of batches."""

    def __init__(self, samples: Samples, size: int) -> None:
        self.samples, self.size = samples, size

    def __iter__(self) -> Iterator[Any]:
        parts = torch.arange(len(self.samples)).split(self.size)
        return ((self.samples.inputs[part], self.samples.targets[part], part) for part in parts)


class Sized(Batches):
    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)


class Shorter(Sized):
    """Says that it has more batches than it yields."""

    def __len__(self) -> int:
        return super().__len__() + 2


@pytest.mark.parametrize("loader", [Batches, lambda data, size: DataLoader([*Batches(data, size)], batch_size=None)])
@pytest.mark.parametrize("micro_batch", [3, 8])
def test_data_that_cannot_be_cut_anew_are_cut_in_the_step_as_told(
    loader: Any, micro_batch: int, micro_batching: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line, if anything is cut."""
    with caplog.at_level("INFO"):
        fit(loader(Samples(32), 8), AutoAccumulate(micro_batch_size=micro_batch), max_epochs=1)
    lines = sum("cuts batches in the training step" in record.message for record in caplog.records)
    assert lines == (micro_batch < 8) or micro_batching == "step"


def test_data_that_end_before_their_length_end_the_epoch() -> None:
    """As in stock Lightning; here after two full windows."""
    data, callback = Shorter(Samples(32), 8), AutoAccumulate(micro_batch_size=3)
    module, trainer = fit(data, callback, accumulate_grad_batches=2, max_epochs=EPOCHS)
    assert module.windows == cut(range(32), 16) * EPOCHS
    assert worst_error(module.gradients, plain_loop(Samples(32), module.windows)) <= 1e-12
    assert trainer.global_step == 2 * EPOCHS


class Unequal(Sampler[list[int]]):
    """Batches such as those of a budget of tokens."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(a, b)) for a, b in pairwise((0, 9, 10, 16, 18))])


class Logging(Validated):
    """Logs its loss and a metric, and moves statistics in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError().double()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += len(batch[0])
        self.metric.update(self.net(batch[0]), batch[1])
        value = super().training_step(batch, batch_idx)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("loss", value, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return value

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"] > 0, "callbacks read it"
        super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("on_oom", ["split", "raise"])
def test_a_batch_of_fewer_samples_than_others_have_micro_batches_runs_each_once(on_oom: Any) -> None:
    """So logs, metrics and statistics are those of the samples, and validation follows the optimizer's step."""
    seen = []
    for callbacks in ([], [AutoAccumulate(micro_batch_size=2, on_oom=on_oom, verify=False)]):
        loader = DataLoader(Samples(18), batch_sampler=Unequal())
        module, trainer = fit(loader, *callbacks, module=Logging())
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen.append((logged, int(module.seen), module.steps_at_validation, module.windows))
    assert seen[0][0] == pytest.approx(seen[1][0])
    assert seen[0][1:] == seen[1][1:]


def test_a_weighted_sampler_draws_the_same_for_every_micro_batch() -> None:
    """The user's own sampler keeps its weights, and its draws depend on seed and epoch alone."""
    dataset = Samples(40)
    runs = []
    for limit in (3, 16):
        loader = DataLoader(dataset, 16, sampler=WeightedRandomSampler([0.0] * 20 + [1.0] * 20, 40))
        module, _ = fit(loader, AutoAccumulate(micro_batch_size=limit))
        runs.append(module.windows)
    assert runs[0] == runs[1]
    assert min(min(window) for window in runs[0]) >= 20
    assert runs[0][0] != runs[0][3]  # another epoch, another draw


class OwnRandom(Sampler[list[int]]):
    """A batch sampler with random numbers of its own and no word of epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(40))
        self.rng.shuffle(left)
        ends = [0, *sorted(self.rng.sample(range(1, 40), 7)), 40]
        return iter([left[a:b] for a, b in pairwise(ends)])


def test_random_numbers_of_a_sampler_are_a_function_of_the_epoch() -> None:
    """Every epoch holds each sample once, in windows that are the sampler's own batches."""
    loader = DataLoader(Samples(40), batch_sampler=OwnRandom())
    module, _ = fit(loader, AutoAccumulate(micro_batch_size=3), max_epochs=3)
    windows = [sorted(window) for window in module.windows]
    epochs = [windows[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(sum(epoch, [])) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert worst_error(module.gradients, plain_loop(Samples(40), windows)) <= 1e-12


IN_STEP: dict[str, Any] = {"micro_batching": "step", "verify": False}


def test_a_batch_without_such_hooks_stays_on_the_host_and_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = pl.LightningModule._apply_batch_transfer_handler

    def noted(module: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        moved.append(len(batch[0]))
        return real(module, batch, *arguments, **settings)

    monkeypatch.setattr(pl.LightningModule, "_apply_batch_transfer_handler", noted)
    fit(DataLoader(Samples(45), 8), AutoAccumulate(micro_batch_size=3, **IN_STEP), max_epochs=1)
    # On a CPU there is nothing to move: the batch is there.
    assert moved == ([3, 3, 2] * 5 + [3, 2] if torch.cuda.is_available() else [8] * 5 + [5])
