"""Windows that are cut by the sizes of their samples: the same windows and gradients, within the budget."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_records import joined, run_ranks
from reference import Samples, SaveAt, StreamOf, cut, fit, permutation, plain_loop, worst_error
from texts import LONGEST, Reader, Reading, Texts, pad, plain_gradients, windows_of
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.schedule import by_step
from lightning_ga.testing import limit_memory
from lightning_ga.weights import TargetTokens

SIZE, EFFECTIVE, SEED = 150, 64, 7  # three windows an epoch, the last of 22 samples
DATA = Texts(SIZE)
WINDOWS = [window for epoch in range(2) for window in cut(permutation(SIZE, SEED, epoch), EFFECTIVE)]
SORTED = [sorted(window) for window in WINDOWS]


def length(data: Texts, index: int) -> int:
    return data.lengths[index]


def train(micro_batch: Any = 4, *callbacks: pl.Callback, by: str = "samples", **arguments: Any) -> Any:
    """A fit of two epochs; the module that kept its micro-batches, and the callback."""
    loader = {"batch_size": 16, "shuffle": True, "collate_fn": pad, "num_workers": arguments.pop("num_workers", 0)}
    settings = {name: arguments.pop(name) for name in ("ckpt_path", "max_epochs") if name in arguments}
    module = arguments.pop("module", None) or Reading(by)
    normalize: Any = TargetTokens() if by == "words" else "samples"
    given = {"effective_batch_size": EFFECTIVE, "size_of": length, "normalize": normalize, **arguments}
    callback = AutoAccumulate(micro_batch_size=micro_batch, **given)
    fit(DataLoader(DATA, **loader), callback, *callbacks, module=module, **settings)
    return module, callback


@pytest.mark.parametrize("by", ["samples", "words"])
@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_gradients_are_those_of_the_padded_window(by: str, micro_batch: int) -> None:
    """In ragged windows, too; no micro-batch is above as many padded words as the longest samples take."""
    module, callback = train(micro_batch, by=by)
    assert windows_of(module.micro_batches) == SORTED
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS, by)) <= 1e-12
    budget = micro_batch * LONGEST
    assert all(rows == 1 or rows * columns <= budget for rows, columns in module.shapes)
    assert (callback.plan.size_budget, callback.plan.samples_at_most) == (budget, EFFECTIVE)
    assert callback.exactness.cause == "exact"


def test_passes_and_padding_are_fewer() -> None:
    """Than in the order of the samples, at the same most padded words of a pass."""
    by_size, callback = train(4)
    as_drawn, _ = train(4, size_of=None)
    assert len(by_size.shapes) <= len(as_drawn.shapes) / 2
    padded = [sum(rows * columns for rows, columns in module.shapes) for module in (by_size, as_drawn)]
    assert padded[0] < 0.7 * padded[1]
    assert max(rows * columns for rows, columns in by_size.shapes) <= 4 * LONGEST
    epochs = [
        [shape for (step, _), shape in zip(module.micro_batches, module.shapes) if step >= 3]
        for module in (by_size, as_drawn)
    ]  # the second, which the plan is of
    plan, counts, held = callback.plan, [rows for rows, _ in epochs[0]], sum(DATA.lengths)
    assert (min(counts), max(counts)) == (plan.fewest_samples, plan.micro_batch_size)
    assert max(rows * columns for rows, columns in epochs[0]) == plan.most_padded
    padding = [1 - held / sum(rows * columns for rows, columns in epoch) for epoch in epochs]
    assert [plan.padding, plan.padding_as_drawn] == pytest.approx(padding)


def test_a_largest_micro_batch_bounds_the_samples() -> None:
    module, callback = train(4, max_micro_batch_size=6)
    assert max(rows for rows, _ in module.shapes) == callback.plan.samples_at_most == 6
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS)) <= 1e-12


@pytest.mark.parametrize("size_of", ["lengths", "words", "auto"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_sizes_by_name(size_of: str, num_workers: int) -> None:
    """A column of the dataset, a field of its samples, or the extent that varies: the same micro-batches."""
    module, _ = train(4, size_of=size_of, num_workers=num_workers, max_epochs=1)
    assert module.micro_batches == train(4, max_epochs=1)[0].micro_batches


@pytest.mark.parametrize("step", range(1, 6))
def test_a_resume_goes_on_with_the_next_window(step: int, tmp_path: Path) -> None:
    """With another micro-batch, too."""
    path = tmp_path / "last.ckpt"
    whole, _ = train(4, SaveAt(path, step))
    resumed, _ = train(7, ckpt_path=path)
    assert windows_of(resumed.micro_batches) == SORTED[step:]
    assert worst_error(resumed.gradients, whole.gradients[step:]) <= 1e-12


class Cramped(Reading):
    """Memory runs out above so many padded words."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch["words"].numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out in training:UserWarning")
def test_windows_survive_and_the_next_epoch_keeps_below() -> None:
    """The limit counts samples × longest: batches of short samples are not cut to as few as of the longest."""
    module, callback = train(8, module=Cramped(5 * LONGEST), verify=False, max_epochs=3)
    assert callback.oom_events == 1
    windows = [*WINDOWS, *cut(permutation(SIZE, SEED, 2), EFFECTIVE)]
    assert worst_error(module.gradients, plain_gradients(DATA, windows)) <= 1e-12
    assert callback.plan.size_budget <= 5 * LONGEST
    later = [rows for (step, _), (rows, _) in zip(module.micro_batches, module.shapes) if step >= 3]
    assert max(later) > 5


def test_an_event_says_what_the_limit_counts() -> None:
    with pytest.warns(UserWarning, match="from now on none has more samples × longest"):
        train(8, module=Cramped(5 * LONGEST), verify=False)


class Struggling:
    """An allocator that has to free its cache once."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0

    def struggles(self) -> bool:
        self.calls += 1
        return self.calls == 1

    def begin_again(self) -> None:
        pass


def test_a_struggle_of_the_allocator_says_what_the_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ga.fit.engine.RetryWatch", Struggling)
    told = "with 8 of the longest samples, .* no pass has more than 7 of the longest samples, or as much as these hold"
    with pytest.warns(UserWarning, match=told):
        train(8, max_epochs=1)


def ramp(data: Any, index: int) -> int:
    return 1 + index % 13


ROWS: dict[str, Any] = {
    "ragged": ("shuffled", 53, [w for epoch in range(2) for w in cut(permutation(53, 7, epoch), 16)], 2),
    "a rank without a sample": (
        "shuffled",
        33,
        [w for epoch in range(2) for w in cut(permutation(33, 7, epoch), 16)],
        2,
    ),
    "three ranks": ("shuffled", 50, [w for epoch in range(2) for w in cut(permutation(50, 7, epoch), 16)], 3),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ROWS)
def test_ranks_share_windows_out_by_size(name: str, tmp_path: Path) -> None:
    """As many micro-batches on each, the same windows and gradients as in one pass."""
    loader, size, windows, ranks = ROWS[name]
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 2, "size_of": ramp}
    records = run_ranks(tmp_path, loader=loader, size=size, batch_size=4, ranks=ranks, accumulate=accumulate)
    assert joined(records) == [sorted(window) for window in windows]
    assert len({len(record["micro_batches"]) for record in records}) == 1
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12
        for _, indices in record["micro_batches"]:
            assert len(indices) == 1 or len(indices) * max(ramp(None, i) for i in indices) <= 2 * 13


@pytest.mark.distributed
def test_ranks_with_orders_of_their_own(tmp_path: Path) -> None:
    """Each cuts its own share, into as many micro-batches as the rank that needs most."""
    accumulate = {"micro_batch_size": 2, "size_of": ramp}
    trainer = {"use_distributed_sampler": False}
    records = run_ranks(
        tmp_path, loader="own share", size=45, batch_size=4, ranks=2, accumulate=accumulate, trainer=trainer
    )
    shares = [cut(range(rank, 45, 2), 4) for rank in range(2)]
    windows = [[*one, *other] for one, other in zip(*shares)] * 2
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(45), windows)) <= 1e-12


class Nameless(Dataset):
    """Samples are tuples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index), index


@pytest.mark.parametrize(
    ("size_of", "told"),
    [
        ("tokens", "size_of='tokens' is neither an attribute of the dataset nor of a sample"),
        (lambda data, i: -1, "a size is a whole number of at least 0"),
        (lambda data, i: 0.5, "a size is a whole number of at least 0"),
        (lambda data, i: 2**31 - 1 + (i == 3), "returned for 3 is 2147483648: .* at most 2,147,483,647"),
        (lambda data, i: 2**63, "returned for 0 is 9223372036854775808: .* at most 2,147,483,647"),
    ],
)
def test_what_is_no_size_is_refused(size_of: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        fit(DataLoader(Nameless(), 2), AutoAccumulate(micro_batch_size=1, size_of=size_of))


def test_an_error_of_size_of_names_it_and_the_index() -> None:
    def size_of(data: Any, index: int) -> int:
        return {0: 1, 1: 1}[index]

    with pytest.raises(KeyError) as caught:
        fit(DataLoader(Nameless(), 2), AutoAccumulate(micro_batch_size=1, size_of=size_of))
    assert any("size_of= raised this" in note and "the index 2" in note for note in caught.value.__notes__)


def test_data_without_indices_to_sort_are_refused() -> None:

    class Own(BatchSampler):
        pass

    for loader, told in (
        (
            DataLoader(StreamOf(Nameless()), 2),
            "share a batch, and a stream has no indices: name what .*='attention_mask', or leave size_of=",
        ),
        (
            DataLoader(Nameless(), batch_sampler=Own(range(8), 2, False)),
            "size_of= decides by index which .* share a batch, and here the batch sampler Own decides that: name "
            'what shows the sizes in a batch, .* with micro_batching="step", or leave size_of= out',
        ),
        ([1, 2, 3], "The training data is a list"),
    ):
        with pytest.raises(UserError, match=told):
            fit(loader, AutoAccumulate(micro_batch_size=1, size_of=ramp))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"size_of": 3}, "size_of=3 must be a callable"),
        ({"size_of": ""}, "size_of='' must be a callable"),
        ({"size_of": lambda index: 1}, "called with the dataset, index alone: take that"),
        ({"size_of": ramp, "accumulate": 4}, "size_of= and accumulate=4 do not go together"),
        ({"size_of": ramp, "micro_batching": "step"}, "size_of= and micro_batching='step' do not go together"),
        ({"size_of": ramp, "whole": ("net",)}, "size_of= and whole=.'net',. do not go together"),
        (
            {"size_of": ramp, "effective_batch_size": by_step({0: 8, 4: 16})},
            "size_of= and effective_batch_size=.* do not go together",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        AutoAccumulate(**arguments)


def test_micro_batches_of_a_window_go_from_the_costliest_on() -> None:
    """So that an allocator finds room for later ones in the blocks of earlier ones."""
    module, _ = train(4, max_epochs=1)
    costs = [[r * c for (s, _), (r, c) in zip(module.micro_batches, module.shapes) if s == step] for step in range(3)]
    assert all(before >= after for window in costs for before, after in pairwise(window))


class Wide(Reading):
    """Much memory for each word, its square, or for each sample whatever its length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = Reader(width=32), kind
        self.head = torch.nn.Linear(32, 2000)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch["words"].shape))
        words = batch["words"]
        hidden = self.net.embed(words)
        if self.kind == "square":
            pairs = (hidden @ hidden.transpose(1, 2)).repeat(1, 1, 4).exp()
            return self.net.losses(batch).mean() + 0 * pairs.mean()
        if self.kind == "sample":
            return self.net.losses(batch).mean() + 0 * self.head(hidden[:, 0]).exp().mean()
        return self.net.losses(batch).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.mark.parametrize("kind", ["word", "square", "sample"])
def test_the_budget_found_lasts_an_epoch(kind: str) -> None:
    """Whatever memory grows with; in at most eight steps, and the plan says both limits."""
    with limit_memory("1.5 MB"):
        module, callback = train("auto", module=Wide(kind), memory_budget="1.5 MB", verify=False, cache=False)
    assert callback.oom_events == 0
    probe, plan = callback.probe, callback.plan
    assert probe.steps <= 8
    assert (plan.size_budget, plan.samples_at_most) == (probe.sizes.budget, min(probe.sizes.samples, EFFECTIVE))
    assert all(rows <= plan.samples_at_most for rows, _ in module.shapes)
    assert (probe.sizes.offset > 0) is (kind == "sample")


def test_limits_are_kept_by_a_checkpoint_and_verified_from_the_cache(tmp_path: Path) -> None:
    """Those of shorter samples with them: one step for each that is verified, none after a resume."""
    path = tmp_path / "last.ckpt"
    settings = {"memory_budget": "1.5 MB", "verify": False}
    _, first = train("auto", SaveAt(path, 2), module=Wide("sample"), **settings)
    _, again = train("auto", SaveAt(path, 2), module=Wide("sample"), **settings)
    _, resumed = train("auto", module=Wide("sample"), ckpt_path=path, **settings)
    assert [each.probe.source for each in (first, again, resumed)] == ["probe", "cache", "checkpoint"]
    assert first.probe.sizes == again.probe.sizes == resumed.probe.sizes
    assert (again.probe.steps, resumed.probe.steps) == (1 + first.probe.steps - 4, 0)


def test_a_loader_that_is_made_anew_is_cut_by_size_as_well() -> None:
    """With limits that have fallen meanwhile."""
    data = Data()
    callback = AutoAccumulate(EFFECTIVE, micro_batch_size=8, size_of=length, verify=False)
    module = Cramped(5 * LONGEST)
    with pytest.warns(UserWarning, match="Memory ran out"):
        fit(data, callback, module=module, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert data.loaders == 3
    later = [shape for (step, _), shape in zip(module.micro_batches, module.shapes) if step >= 3]
    assert max(rows for rows, _ in later) > 8
    assert max(rows * columns for rows, columns in later) <= callback.plan.size_budget <= 5 * LONGEST
    windows = [*WINDOWS, *cut(permutation(SIZE, SEED, 2), EFFECTIVE)]
    assert worst_error(module.gradients, plain_gradients(DATA, windows)) <= 1e-12


class Data(pl.LightningDataModule):
    """Counts its loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.loaders = 0

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return DataLoader(DATA, 16, shuffle=True, collate_fn=pad)


def test_throughput_decides_the_number_of_micro_batches_by_what_a_pass_costs() -> None:
    """Measured from windows of several sizes; the windows and gradients are the same."""
    settings = {"memory_budget": "800 kB", "cache": False, "objective": "throughput"}
    _, callback = train("auto", module=Wide("word"), verify=False, max_epochs=1, **settings)
    assert callback.probe.sizes.pass_cost is not None
    assert len(callback.probe.timings) > 1
    module, _ = train("auto", max_epochs=1, **{**settings, "memory_budget": "250 kB"})
    assert windows_of(module.micro_batches) == SORTED[:3]
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS[:3])) <= 1e-12
