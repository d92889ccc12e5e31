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
    SizedStreamOf,
    StreamOf,
    Validated,
    cut,
    fit,
    permutation,
    plain_loop,
    worst_error,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from lightning_ga import AutoAccumulate

SEED = 7
EPOCHS = 2


class FixedLoader(DataLoader):
    """A subclass whose constructor takes nothing that a DataLoader's takes."""

    def __init__(self, samples: Dataset, *, size: int) -> None:
        super().__init__(samples, batch_size=size, shuffle=False)


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


class Stream(Batches, IterableDataset):
    """Ready-made batches of a dataset."""


def in_order(dataset: Samples, epoch: int) -> list[int]:
    return list(range(len(dataset)))


def shuffled(dataset: Samples, epoch: int) -> list[int]:
    return permutation(len(dataset), SEED, epoch)


WAYS = {
    "keyword arguments": (lambda d, b: DataLoader(dataset=d, batch_size=b), in_order),
    "positional arguments": (lambda d, b: DataLoader(d, b, True), shuffled),
    "subclass with fixed arguments": (lambda d, b: FixedLoader(d, size=b), in_order),
    "batch sampler of torch": (
        lambda d, b: DataLoader(d, batch_sampler=BatchSampler(range(len(d)), b, False)),
        in_order,
    ),
    "iterable dataset": (lambda d, b: DataLoader(StreamOf(d), batch_size=b), in_order),
    "iterable dataset with a length": (lambda d, b: DataLoader(SizedStreamOf(d), batch_size=b), in_order),
    "workers": (lambda d, b: DataLoader(d, b, shuffle=True, num_workers=1), shuffled),
    "persistent workers": (
        lambda d, b: DataLoader(d, b, shuffle=True, num_workers=2, persistent_workers=True),
        shuffled,
    ),
    "distributed sampler": (
        lambda d, b: DataLoader(d, b, sampler=DistributedSampler(d, num_replicas=1, rank=0, seed=3)),
        lambda d, epoch: permutation(len(d), 3, epoch),
    ),
    "own generator": (
        lambda d, b: DataLoader(d, b, shuffle=True, generator=torch.Generator().manual_seed(11)),
        lambda d, epoch: permutation(len(d), 11, epoch),
    ),
    "an iterable": (Batches, in_order),
    "a sized iterable": (Sized, in_order),
    "batch_size=None": (lambda d, b: DataLoader(Stream(d, b), batch_size=None), in_order),
}
CUT_IN_STEP = ("an iterable", "a sized iterable", "batch_size=None")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_equal_the_recipe_run_whole(
    way: str, draw: int, micro_batching: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Relative error ≤ 1e-12 in fp64 for random sizes, ragged windows included, and as many steps.

    Data that cannot be cut anew are cut in the step, with one line that says so.
    """
    rng = random.Random(f"{way} {draw}")
    dataset = Samples(rng.randint(20, 90))
    batch_size, factor, limit = rng.randint(1, 20), rng.randint(1, 4), rng.randint(1, 24)
    make, order = WAYS[way]

    callback, settings = AutoAccumulate(micro_batch_size=limit), {"max_epochs": EPOCHS, "seed": SEED}
    with caplog.at_level("INFO"):
        module, _ = fit(make(dataset, batch_size), callback, accumulate_grad_batches=factor, **settings)
    windows = [w for epoch in range(EPOCHS) for w in cut(order(dataset, epoch), batch_size * factor)]
    assert [sorted(window) for window in module.windows] == [sorted(window) for window in windows]
    assert worst_error(module.gradients, plain_loop(dataset, windows)) <= 1e-12
    assert max(len(indices) for _, indices in module.micro_batches) <= limit
    lines = sum("cuts batches in the training step" in record.message for record in caplog.records)
    is_cut_in_step = way in CUT_IN_STEP and limit < min(batch_size, len(dataset))
    assert lines == is_cut_in_step or micro_batching == "step"


def test_data_that_end_before_their_length_end_the_epoch() -> None:
    """As in stock Lightning; here after two full windows."""
    data, callback = Shorter(Samples(32), 8), AutoAccumulate(micro_batch_size=3)
    module, trainer = fit(data, callback, accumulate_grad_batches=2, max_epochs=EPOCHS)
    assert module.windows == cut(range(32), 16) * EPOCHS
    assert worst_error(module.gradients, plain_loop(Samples(32), module.windows)) <= 1e-12
    assert trainer.global_step == 2 * EPOCHS


@pytest.mark.parametrize(
    ("way", "effective"),
    [
        *(("keyword arguments", effective) for effective in (1, 7, 500)),
        *(("iterable dataset", effective) for effective in (1, 7, 500)),
    ],
)
@pytest.mark.filterwarnings("ignore:The effective batch of 500 samples is above the 53")
def test_an_effective_batch_of_the_users_own(way: str, effective: int) -> None:
    dataset = Samples(53)
    make, order = WAYS[way]
    module, _ = fit(make(dataset, 8), AutoAccumulate(effective, micro_batch_size=5), max_epochs=EPOCHS, seed=SEED)
    windows = [w for epoch in range(EPOCHS) for w in cut(order(dataset, epoch), effective)]
    assert worst_error(module.gradients, plain_loop(dataset, windows)) <= 1e-12


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
