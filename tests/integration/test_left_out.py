"""``on_oom="skip"``: which sample is named, and how many may be left out. Memory runs out for chosen samples."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Regression, Samples, SaveAt, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.schedule import by_step

FULL = "CUDA out of memory, at a chosen sample."


class Refusing(Regression):
    """Runs out of memory with some samples, at every attempt."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = set(refused)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.refused.intersection(batch[2].tolist()):
            raise torch.OutOfMemoryError(FULL)
        return super().training_step(batch, batch_idx)


class Flat(Regression):
    """Has no submodules, of which any could be computed again."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.weight = torch.nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] @ self.weight - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: Any, *arguments: Any, samples: int, batch: int = 4, **given: Any) -> AutoAccumulate:
    """One epoch in order, in which samples may be left out."""
    callback = AutoAccumulate(*arguments, on_oom="skip", verify=False, cache=False, **given)
    loader = DataLoader(Samples(samples), batch_size=batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(loader, callback, module=module, max_epochs=1)
    return callback


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "skipped.csv").open() as file:
        return [*csv.DictReader(file)]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_sample_at_the_start_of_its_window_is_listed_with_its_own_shapes(mode: str, tmp_path: Path) -> None:
    """Attempts with four and two samples failed at the same place before."""
    train(Refusing(4), samples=16, micro_batch_size=4, micro_batching=mode)
    (row,) = rows_of(tmp_path)
    assert (row["window"], row["place"], row["size"]) == ("1", "0", "(1, 5) (1, 1) (1,)")


def test_memory_that_runs_out_before_a_pass_leaves_out_no_sample_that_trial_steps_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before samples are left out, trial steps see what can be computed again: they name no sample."""
    module = Flat()
    moved: list[int] = []

    def transfer_batch_to_device(batch: Any, *_: Any) -> Any:
        moved.append(len(batch[0]))
        if len(moved) == 3:
            raise torch.OutOfMemoryError(FULL)
        return batch

    monkeypatch.setattr(module, "transfer_batch_to_device", transfer_batch_to_device)
    with pytest.raises(UserError, match="with one sample alone"):
        train(module, samples=8, micro_batch_size=1, checkpoint="auto")
    assert not (tmp_path / "skipped.csv").exists()


def test_memory_that_runs_out_before_a_pass_leaves_out_no_sample_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second micro-batch of two failed; then the first of four could not be moved to the device."""
    module = Refusing(2)
    moved: list[int] = []

    def transfer_batch_to_device(batch: Any, *_: Any) -> Any:
        moved.append(len(batch[0]))
        if moved == [2, 2, 1]:
            raise torch.OutOfMemoryError(FULL)
        return batch

    monkeypatch.setattr(module, "transfer_batch_to_device", transfer_batch_to_device)
    with pytest.raises(UserError, match="with one sample alone"):
        train(module, samples=4, micro_batch_size=2)
    assert moved == [2, 2, 1]
    assert not (tmp_path / "skipped.csv").exists()


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_one_in_a_hundred_is_counted_in_samples_of_the_epoch(mode: str, tmp_path: Path) -> None:
    """Whatever its windows are: those of a schedule, and of ``accumulate=``."""
    schedule: dict[str, Any] = {"micro_batching": mode, "micro_batch_size": 2}
    with pytest.raises(UserError, match="and 2 of this epoch did not fit"):
        train(Refusing(9, 17), by_step({0: 4, 1000: 64}), samples=100, **schedule)
    given: dict[str, Any] = {"micro_batching": mode, "micro_batch_size": 1, "accumulate": 4, "batch": 2}
    train(Refusing(9, 49), samples=200, **given)
    assert [row["place"] for row in rows_of(tmp_path)[2:]] == ["1", "1"]
    with pytest.raises(UserError, match="and 3 of this epoch did not fit"):
        train(Refusing(9, 49, 89), samples=200, **given)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_the_effective_batch_of_accumulate_is_that_of_the_plan(mode: str) -> None:
    """In the step the factor multiplies batches of the loader, however small their pieces are."""
    callback = AutoAccumulate(accumulate=4, micro_batch_size=2, micro_batching=mode, verify=False)
    fit(DataLoader(Samples(64), batch_size=8), callback, max_epochs=1)
    effective = 32 if mode == "step" else 8
    assert callback.plan.effective_batch_size == effective
    assert callback._fit.data.windows.planner.effective(0) == effective


def test_a_limit_that_was_found_for_a_larger_window_outlives_the_sample_that_this_window_leaves_out() -> None:
    """The window of 16 asks what fits before it runs, and begins again without its refused sample."""
    module = Refusing(10)
    train(module, by_step({0: 4, 2: 16}), samples=72)
    assert [len(indices) for _, indices in module.micro_batches][-3:] == [16, 16, 16]


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("refused", [4, 12])
def test_only_the_window_of_a_sample_that_is_left_out_has_smaller_passes(
    refused: int, mode: Any, tmp_path: Path
) -> None:
    """Also if it is the last of an epoch, and in a run that is resumed after it."""
    module = Refusing(refused)
    train(module, samples=16, micro_batch_size=4, micro_batching=mode)
    sizes = [len(indices) for _, indices in module.micro_batches]
    assert sizes.count(4) == 3
    saved, later = tmp_path / "saved.ckpt", Regression()
    callback = AutoAccumulate(on_oom="skip", verify=False, micro_batch_size=4, micro_batching=mode)
    loader = DataLoader(Samples(16), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(loader, callback, SaveAt(saved, 4), module=Refusing(refused), max_epochs=1)
        again = AutoAccumulate(on_oom="skip", verify=False, micro_batch_size=4, micro_batching=mode)
        fit(loader, again, module=later, max_epochs=2, ckpt_path=saved)
    assert {len(indices) for _, indices in later.micro_batches} == {4}
