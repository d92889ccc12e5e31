"""One seed, one course of training: the same samples and the same losses on any hardware."""

from math import fsum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_records import joined, run_ranks
from reference import LossBySample, Samples, SaveAt, cut, fit, permutation
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.loading import sampler
from lightning_ga.loading.sampler import Permutation

SIZE, EFFECTIVE, EPOCHS, SEED = 53, 12, 2, 7  # five windows an epoch, the last of 5 samples
WINDOWS = [window for epoch in range(EPOCHS) for window in cut(permutation(SIZE, SEED, epoch), EFFECTIVE)]
SAMPLES = [sorted(window) for window in WINDOWS]
MID_EPOCH = 7  # steps: the second window of the second epoch is done
ON_RANKS: dict[str, Any] = {"size": SIZE, "batch_size": 4, "dtype": "float32", "trainer": {"max_epochs": EPOCHS}}

Losses = list[float]


def run(micro_batch: int, *callbacks: pl.Callback, num_workers: int = 0, **settings: Any) -> LossBySample:
    """One fit on one rank, in this process."""
    module, _ = fit(
        DataLoader(Samples(SIZE, torch.float32), batch_size=4, shuffle=True, num_workers=num_workers),
        AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=micro_batch),
        *callbacks,
        module=LossBySample(dtype=torch.float32),
        **{"max_epochs": EPOCHS, "seed": SEED, **settings},
    )
    return module


def mean_losses(*ranks: Any) -> Losses:
    """Mean loss of each window over its samples on all ranks: a rank without one runs a stand-in, seen twice."""
    windows: dict[int, dict[int, float]] = {}
    for record in ranks:
        read = record.__getitem__ if isinstance(record, dict) else record.__getattribute__
        for (step, indices), losses in zip(read("micro_batches"), read("losses"), strict=True):
            windows.setdefault(step, {}).update(zip(indices, losses, strict=True))
    return [fsum(windows[step].values()) / len(windows[step]) for step in sorted(windows)]


def samples(module: LossBySample) -> list[list[int]]:
    return [sorted(window) for window in module.windows]


def plain_losses() -> Losses:
    """Plain SGD in which each window is one batch."""
    module, data = LossBySample(dtype=torch.float32), Samples(SIZE, torch.float32)
    optimizer = module.configure_optimizers()
    losses = []
    for window in WINDOWS:
        optimizer.zero_grad()
        loss = (module.net(data.inputs[window]) - data.targets[window]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def agree(ours: Losses, theirs: Losses) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(ours, theirs))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Losses, Path]:
    """The losses of windows in one micro-batch on one rank, and a checkpoint from the middle of an epoch."""
    path = tmp_path_factory.mktemp("whole") / "mid_epoch.ckpt"
    module = run(EFFECTIVE, SaveAt(path, MID_EPOCH))
    assert samples(module) == SAMPLES
    return mean_losses(module), path


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What four ranks recorded, and a checkpoint from the middle of an epoch."""
    folder = tmp_path_factory.mktemp("four")
    accumulate = {"effective_batch_size": EFFECTIVE, "micro_batch_size": 1}
    records = run_ranks(folder, ranks=4, accumulate=accumulate, loader="float32", save=True, **ON_RANKS)
    return records, folder / f"step{MID_EPOCH}.ckpt"


def test_windows_whole_are_plain_training(whole: tuple[Losses, Path]) -> None:
    assert agree(whole[0], plain_losses())


@pytest.mark.parametrize(
    ("micro_batch", "num_workers"), [(1, 0), (2, 0), (5, 0), (5, 2), (7, 0), (11, 0), (100, 0), (100, 2)]
)
def test_the_micro_batch_changes_nothing(micro_batch: int, num_workers: int, whole: tuple[Losses, Path]) -> None:
    module = run(micro_batch, num_workers=num_workers)
    assert samples(module) == SAMPLES
    assert agree(mean_losses(module), whole[0])


@pytest.mark.distributed
def test_four_ranks_change_nothing(whole: tuple[Losses, Path], on_four_ranks: tuple[list[Any], Path]) -> None:
    """Not even where one of them is left without a sample."""
    records, _ = on_four_ranks
    assert joined(records) == SAMPLES
    assert agree(mean_losses(*records), whole[0])


@pytest.mark.distributed
@pytest.mark.parametrize("micro_batch", [5, 100])
def test_one_rank_takes_over_from_four(
    micro_batch: int, whole: tuple[Losses, Path], on_four_ranks: tuple[list[Any], Path]
) -> None:
    module = run(micro_batch, ckpt_path=on_four_ranks[1], seed=1)
    assert samples(module)[MID_EPOCH:] == SAMPLES[MID_EPOCH:]
    assert agree(mean_losses(module), whole[0][MID_EPOCH:])


@pytest.mark.distributed
def test_three_ranks_take_over_from_one(whole: tuple[Losses, Path], tmp_path: Path) -> None:
    accumulate = {"effective_batch_size": EFFECTIVE, "micro_batch_size": 2}
    resume = {"ckpt_path": str(whole[1]), "loader": "float32, workers"}
    records = run_ranks(tmp_path, ranks=3, accumulate=accumulate, **resume, **ON_RANKS)
    assert joined(records)[MID_EPOCH:] == SAMPLES[MID_EPOCH:]
    assert agree(mean_losses(*records), whole[0][MID_EPOCH:])


def test_all_this_holds_for_orders_that_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of very large data sets are."""
    monkeypatch.setattr(sampler, "LARGEST_WRITTEN_ORDER", 0)
    path = tmp_path / "mid_epoch.ckpt"
    before, after = run(EFFECTIVE, SaveAt(path, MID_EPOCH)), run(5, ckpt_path=path, seed=1)
    orders = [Permutation(SIZE, seed=SEED + epoch)[:].tolist() for epoch in range(EPOCHS)]
    assert samples(before) == [sorted(window) for order in orders for window in cut(order, EFFECTIVE)]
    assert samples(after)[MID_EPOCH:] == samples(before)[MID_EPOCH:]
    assert agree(mean_losses(after), mean_losses(before)[MID_EPOCH:])
