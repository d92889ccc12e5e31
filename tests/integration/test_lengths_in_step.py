"""Ready-made batches cut by the lengths that they show: the same gradients as uncut, within the budget."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from rank_records import run_ranks
from reference import cut, fit, permutation, worst_error
from texts import LONGEST, Reading, Texts, pad, plain_gradients, windows_of
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.batch.layout import LayoutError
from lightning_ga.testing import limit_memory, out_of_memory_at
from lightning_ga.weights import TargetTokens

SIZE, BATCH, SEED = 150, 32, 7  # the last batch holds 22 samples
DATA = Texts(SIZE)
Batch = dict[str, Any]
ORDER = permutation(SIZE, SEED, 0)
BATCHES = cut(ORDER, BATCH)


def plain(samples: list[Any]) -> Batch:
    """No mask: targets of padding are ignored."""
    return pad(samples)


def masked(samples: list[Any]) -> Batch:
    batch = pad(samples)
    return {**batch, "attention_mask": (batch["words"] != 0).long()}


def lengths(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([len(each["words"]) for each in samples])


def with_lengths(samples: list[Any]) -> Batch:
    return {**pad(samples), "lengths": lengths(samples)}


def with_list(samples: list[Any]) -> Batch:
    """Lengths as plain numbers, which are read of collated samples only."""
    return {**pad(samples), "lengths": lengths(samples).tolist()}


def to_one_width(samples: list[Any]) -> Batch:
    """Padded further than the longest sample."""
    batch = masked(samples)
    fill = {"words": 0, "labels": -100, "attention_mask": 0}
    wide = {
        name: torch.nn.functional.pad(batch[name], (0, LONGEST + 6 - batch[name].shape[1]), value=value)
        for name, value in fill.items()
    }
    return {**batch, **wide}


def on_the_left(samples: list[Any]) -> Batch:
    batch = masked([{name: value.flip(0) if name != "number" else value for name, value in s.items()} for s in samples])
    return {name: value.flip(1) if value.dim() == 2 else value for name, value in batch.items()}


def ready_made(collate: Callable[[list[Any]], Batch] = masked) -> Any:
    return DataLoader([collate([DATA[number] for number in batch]) for batch in BATCHES], batch_size=None)


def train(loader: Any, micro_batch: Any = 4, *callbacks: pl.Callback, by: str = "samples", **arguments: Any) -> Any:
    """A fit of an epoch; the module that kept its micro-batches, and the callback."""
    settings = {name: arguments.pop(name) for name in ("ckpt_path", "max_epochs") if name in arguments}
    settings = {"max_epochs": 1, "accumulate_grad_batches": arguments.pop("factor", 1), **settings}
    module = arguments.pop("module", None) or Reading(by)
    normalize: Any = TargetTokens() if by == "words" else "samples"
    given = {"size_of": "auto", "micro_batching": "step", "normalize": normalize, **arguments}
    callback = AutoAccumulate(micro_batch_size=micro_batch, **given)
    fit(loader, callback, *callbacks, module=module, **settings)
    return module, callback


def windows(factor: int = 1) -> list[list[int]]:
    return [sum(BATCHES[start : start + factor], []) for start in range(0, len(BATCHES), factor)]


COLLATES = [plain, masked, with_lengths, to_one_width, on_the_left]


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("by", ["samples", "words"])
def test_gradients_are_those_of_uncut_batches(collate: Any, by: str) -> None:
    """However a batch shows its lengths; pieces are sorted, within the budget, and without columns of padding alone."""
    module, callback = train(ready_made(collate), by=by)
    assert worst_error(module.gradients, plain_gradients(DATA, windows(), by)) <= 1e-12
    budget = callback.plan.size_budget
    assert budget % 4 == 0
    assert all(rows == 1 or rows * columns <= budget for rows, columns in module.shapes)
    for (_, numbers), (rows, columns) in zip(module.micro_batches, module.shapes, strict=True):
        assert (len(numbers), max(DATA.lengths[each] for each in numbers)) == (rows, columns)
    assert callback.exactness.cause == "exact"
    whole = [len(batch) * max(DATA.lengths[each] for each in batch) for batch in BATCHES]
    assert sum(rows * columns for rows, columns in module.shapes) < 0.6 * sum(whole)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("micro_batching", ["step", "loader"])
def test_batches_of_any_loader_are_cut(factor: int, micro_batching: Any) -> None:
    """Cut in the step whether that was asked for or not."""
    module, _ = train(ready_made(), factor=factor, micro_batching=micro_batching)
    assert worst_error(module.gradients, plain_gradients(DATA, windows(factor))) <= 1e-12
    assert max(rows for rows, _ in module.shapes) > 4


@pytest.mark.parametrize(("collate", "size_of"), [(masked, "attention_mask"), (with_list, "lengths"), (plain, "auto")])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_a_loader_collates(num_workers: int, collate: Any, size_of: str) -> None:
    loader = DataLoader(DATA, BATCH, shuffle=True, collate_fn=collate, num_workers=num_workers)
    module, callback = train(loader, size_of=size_of)
    assert worst_error(module.gradients, plain_gradients(DATA, windows())) <= 1e-12
    assert all(rows == 1 or rows * columns <= callback.plan.size_budget for rows, columns in module.shapes)


class InTwoAxes(Reading):
    """Samples have their numbers at each word."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "number": batch["number"].amax(1)}, batch_idx)


def test_a_mask_shows_which_axis_is_that_of_the_samples() -> None:
    """All parts have two axes, and batches are of one size: padding is at the ends of samples; else none is taken."""
    batches = [masked([DATA[number] for number in batch]) for batch in BATCHES[:-1]]
    in_one_row = [{**batch, "positions": torch.arange(batch["words"].shape[1])[None]} for batch in batches]
    with pytest.raises(UserError, match="allow for no reading or for several"):
        train(DataLoader(in_one_row, batch_size=None))
    for batch in batches:
        batch["number"] = batch["number"][:, None].expand(-1, batch["words"].shape[1]) * batch["attention_mask"]
    module, _ = train(DataLoader(batches, batch_size=None), module=InTwoAxes())
    assert worst_error(module.gradients, plain_gradients(DATA, windows()[:-1])) <= 1e-12
    assert max(rows for rows, _ in module.shapes) > 4


def test_the_plan_in_words() -> None:
    _, callback = train(ready_made(), factor=2)
    budget = callback.plan.size_budget
    assert str(callback.plan) == (
        f"window 64 in 2 batches, each sorted by size and cut into micro-batches of at most {budget} padded tokens"
    )


def test_a_batch_within_the_budget_runs_whole() -> None:
    module, _ = train(ready_made(), 100)
    assert [numbers for _, numbers in module.micro_batches] == BATCHES


class Cramped(Reading):
    """Memory runs out above so many padded words."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch["words"].numel() > 3 * LONGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out in training:UserWarning")
@pytest.mark.parametrize(("micro_batch", "factor"), [(6, 1), (100, 1), (6, 2)])
def test_windows_survive(micro_batch: int, factor: int) -> None:
    """Pieces are halved in samples × longest, and stay below what failed."""
    module, callback = train(ready_made(), micro_batch, module=Cramped(), verify=False, factor=factor)
    assert 1 <= callback.oom_events <= 3
    assert worst_error(module.gradients, plain_gradients(DATA, windows(factor))) <= 1e-12
    assert max(rows for rows, _ in module.shapes) > 3


class AtOperation(pl.Callback):
    """Memory runs out at one operation of the second batch, which may be one that cuts it."""

    def __init__(self, operation: int) -> None:
        self.counter, self.is_on = out_of_memory_at(operation), False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counter.__enter__()
            self.is_on = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_on:
            self.counter.__exit__(None, None, None)
            self.is_on = False


@pytest.mark.filterwarnings("ignore:Memory ran out in training:UserWarning")
def test_what_cuts_a_batch_is_survived() -> None:
    """Masks are compared and sorted to find the lengths; what is tried again changes no gradient."""
    survived = []
    for operation in range(2, 200, 22):
        module, callback = train(ready_made(), 4, AtOperation(operation), verify=False)
        survived.append(callback.oom_events)
        assert worst_error(module.gradients, plain_gradients(DATA, windows())) <= 1e-12, operation
    assert 0 in survived
    assert 1 in survived


def test_the_limit_is_found() -> None:
    with limit_memory("250 kB"):
        module, callback = train(ready_made(), "auto", memory_budget="250 kB", verify=False, cache=False)
    assert callback.oom_events == 0
    assert 1 < callback.probe.limit < BATCH
    assert callback.probe.steps <= 8
    assert worst_error(module.gradients, plain_gradients(DATA, windows())) <= 1e-12


class Timed(Reading):
    """A pass takes so many milliseconds, and one for each padded word."""

    now = 0.0

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each = each

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        Timed.now += 1e-3 * (self.each + batch["words"].numel())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("each", "passes"), [(0, (25, 150)), (20, (10, 24)), (600, (5, 6))])
@pytest.mark.parametrize("factor", [1, 2])
def test_throughput_weighs_passes_against_padding(
    each: int, passes: tuple[int, int], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two measured costs, on a made-up clock: batches that fit are cut all the same if passes cost little."""
    monkeypatch.setattr("lightning_ga.probe.trials.time", SimpleNamespace(perf_counter=lambda: Timed.now))
    settings = {"objective": "throughput", "memory_budget": "20 MB", "cache": False, "factor": factor}
    module, callback = train(ready_made(), "auto", module=Timed(each), verify=False, **settings)
    assert callback.probe.limit >= BATCH
    assert callback.probe.sizes.pass_cost == pytest.approx(each, rel=0.05, abs=1)
    assert passes[0] <= len(module.shapes) <= passes[1]
    assert worst_error(module.gradients, plain_gradients(DATA, windows(factor))) <= 1e-12


class Outputs(Reading):
    """Returns what it was given for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers = batch["number"]
        return {"loss": super().training_step(batch, batch_idx), "number": numbers, "names": numbers.tolist()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["number"].tolist() == outputs["names"] == batch["number"].tolist()


def test_outputs_are_in_the_order_of_the_batch() -> None:
    module, _ = train(ready_made(), module=Outputs())
    assert len(module.shapes) > len(BATCHES)


class SeesPadding(Reading):
    """Its mean is over padding, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch["words"]).square().mean()


def test_a_model_that_sees_its_padding_is_refused() -> None:
    with pytest.raises(UserError, match="another gradient without columns of padding .relative error .*: mask"):
        train(ready_made(), module=SeesPadding())


def test_padding_that_no_measured_sample_has_is_kept() -> None:
    """The first batches are of one length, so that the check cannot see what a later one changes."""
    longest = [number for number in ORDER if DATA.lengths[number] >= 12][:8]
    groups = [longest[:4], longest[4:8], *cut(range(40), 20)]
    batches = [masked([DATA[number] for number in group]) for group in groups]
    for batch in batches[:2]:
        batch.update({name: batch[name][:, :12] for name in ("words", "labels", "attention_mask")})
    loader = DataLoader(batches, batch_size=None)
    module, callback = train(loader, 2, module=SeesPadding())
    whole, _ = fit(loader, module=SeesPadding(), max_epochs=1)
    assert callback.exactness.cause == "exact"
    assert worst_error(module.gradients, whole.gradients) <= 1e-12


def test_batches_that_show_no_lengths_are_refused() -> None:
    batches = DataLoader(
        [{name: batch[name] for name in ("words", "number")} for batch in ready_made()], batch_size=None
    )
    for size_of in ("auto", "attention_mask"):
        with pytest.raises(UserError, match=f"size_of='{size_of}' finds no part of the batches"):
            train(batches, size_of=size_of)


def packed(samples: list[Any]) -> Batch:
    """Without padding: one axis holds all words."""
    words = torch.cat([each["words"] for each in samples])
    return {"words": words, "of": torch.repeat_interleave(torch.arange(len(samples)), lengths(samples))}


def test_batches_that_cannot_be_cut_are_refused_with_a_way_out_that_size_of_goes_with() -> None:
    loader = DataLoader(DATA, BATCH, collate_fn=packed)
    with pytest.raises(LayoutError, match="size_of= does without that hook if a map-style dataset is cut with micro"):
        train(loader)


class Splits(Reading):
    def split_batch(self, batch: Any, sizes: Any) -> Iterator[Any]:
        parts = {name: value.split(sizes) for name, value in batch.items()}
        return ({name: parts[name][number] for name in parts} for number in range(len(sizes)))


def test_a_hook_that_cuts_neighbours_is_refused() -> None:
    with pytest.raises(UserError, match="split_batch cuts neighbours"):
        train(ready_made(), module=Splits())


class OnRanks(Reading):
    """Writes down what a rank has seen."""

    folder: Path

    def on_train_end(self) -> None:
        record = {"micro_batches": self.micro_batches, "shapes": self.shapes, "gradients": self.gradients}
        torch.save(record, self.folder / f"rank{self.global_rank}.pt")


class OwnBatches:
    """Two batches on each rank."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        return iter(list(ready_made())[torch.distributed.get_rank() :: 2][:2])


def main(settings: dict[str, Any], folder: Path) -> None:
    """A fit on gloo ranks, in a fork that forks them."""
    module = OnRanks()
    module.folder = folder
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    callback = AutoAccumulate(micro_batch_size=4, size_of="auto", micro_batching="step")
    fit(OwnBatches(), callback, module=module, strategy=strategy, devices=2, max_epochs=1)


@pytest.mark.distributed
def test_ranks_cut_their_own_batches(tmp_path: Path) -> None:
    """Each by its own sizes; the gradient is that of both whole."""
    records = run_ranks(tmp_path, program=SimpleNamespace(main=main), ranks=2)
    ours = [sum(both, []) for both in zip(*(windows_of(record["micro_batches"]) for record in records))]
    assert [sorted(window) for window in ours] == [sorted(window) for window in windows(2)[:2]]
    for record in records:
        assert worst_error(record["gradients"], plain_gradients(DATA, ours)) <= 1e-12
        assert len(record["shapes"]) > 2
        assert max(rows for rows, _ in record["shapes"]) > 4
