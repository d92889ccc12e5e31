"""Samples of many sizes: windows that are cut by them, and limits that hold for the longest.

The oracle of windows and gradients is a plain loop, in which each window is one padded batch.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import SaveAt, cut, fit, permutation, worst_error
from texts import LONGEST, Reader, Reading, Texts, pad, plain_gradients
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError, optimizer_steps
from lightning_ga.counters import TargetTokens
from lightning_ga.loading.orders import Sequential
from lightning_ga.loading.rebatch import SourceSettings
from lightning_ga.loading.sample_sizes import SampleSizes, _column
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.plan.batch_schedule import constant
from lightning_ga.plan.size_cuts import SizeLimits
from lightning_ga.testing import limit_memory

SIZE, EFFECTIVE, SEED = 150, 64, 7  # three windows an epoch, the last of 22
DATA = Texts(SIZE)


def epochs(count: int) -> list[list[int]]:
    """The windows of so many epochs."""
    return list(chain.from_iterable(cut(permutation(SIZE, SEED, epoch), EFFECTIVE) for epoch in range(count)))


def length(data: Texts, index: int) -> int:
    return data.lengths[index]


class Horizon(Reading):
    """Asks how many steps there will be."""

    steps: float = 0

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        return super().configure_optimizers()


def train_horizon(micro_batch: Any = 4, *callbacks: pl.Callback, by: str = "samples", **arguments: Any) -> Any:
    """A fit of two epochs; the module that kept its micro-batches, and the callback."""
    module = arguments.pop("module", None) or Horizon(by)
    settings = {name: arguments.pop(name) for name in ("ckpt_path", "max_epochs") if name in arguments}
    module.train_dataloader = partial(
        DataLoader, DATA, 16, shuffle=True, collate_fn=pad, num_workers=arguments.pop("num_workers", 0)
    )
    given = {"effective_batch_size": EFFECTIVE, "size_of": length, **arguments}
    given |= {"normalize": TargetTokens()} if by == "words" else {}
    callback = AutoAccumulate(micro_batch_size=micro_batch, micro_batching="loader", **given)
    fit(None, callback, *callbacks, module=module, **settings)
    return module, callback


def assert_trained(windows: list[list[int]], module: Any, by: str = "samples") -> None:
    """Windows and gradients are those of a plain loop."""
    assert [sorted(window) for window in module.windows] == [sorted(window) for window in windows]
    assert worst_error(module.gradients, plain_gradients(DATA, windows, by)) <= 1e-12


def test_passes_and_padding_are_fewer() -> None:
    """Than in the order of the samples, at the same most padded words of a pass; as the plan says."""
    (module, callback), (as_drawn, _) = train_horizon(4, by="words"), train_horizon(4, size_of=None, by="words")
    assert_trained(epochs(2), module, "words")
    assert all(rows == 1 or rows * columns <= 4 * LONGEST for rows, columns in module.shapes)
    assert callback.plan.size_budget == 4 * LONGEST
    assert module.steps == callback.optimizer_steps() == module.trainer.global_step
    assert callback.exactness.cause == "exact"
    assert len(module.shapes) <= len(as_drawn.shapes) / 2
    second = [
        [shape for (step, _), shape in zip(each.micro_batches, each.shapes) if step >= 3] for each in (module, as_drawn)
    ]  # the epoch that the plan is of
    plan, counts, real = callback.plan, [rows for rows, _ in second[0]], sum(DATA.lengths)
    assert (min(counts), max(counts)) == (plan.fewest_samples, plan.micro_batch_size)
    assert max(rows * columns for rows, columns in second[0]) == plan.most_padded
    padding = [1 - real / sum(rows * columns for rows, columns in epoch) for epoch in second]
    assert [plan.padding, plan.padding_as_drawn] == pytest.approx(padding)
    assert padding[0] < padding[1] / 2


def test_micro_batches_are_bounded_and_begin_with_the_costliest() -> None:
    """So that an allocator finds room for later ones in the blocks of earlier ones."""
    module, callback = train_horizon(4, max_micro_batch_size=6, max_epochs=1)
    assert max(rows for rows, _ in module.shapes) == callback.plan.samples_at_most == 6
    assert_trained(epochs(1), module)
    costs = [[r * c for (s, _), (r, c) in zip(module.micro_batches, module.shapes) if s == step] for step in range(3)]
    assert all(before >= after for window in costs for before, after in pairwise(window))


@pytest.mark.parametrize(("size_of", "num_workers"), [("lengths", 0), ("words", 0), ("auto", 1)])
def test_sizes_by_name(size_of: str, num_workers: int) -> None:
    """A column of the dataset, a field of its samples, or the extent that varies: the same micro-batches."""
    module, _ = train_horizon(4, size_of=size_of, num_workers=num_workers, max_epochs=1)
    assert module.micro_batches == train_horizon(4, max_epochs=1)[0].micro_batches


class Wide(Reading):
    """Much memory for each word, its square, each sample whatever its length, or each word that is no padding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = Reader(width=32), kind
        self.head = torch.nn.Linear(32, 200 if kind == "unpadded" else 2000)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch["words"].shape))
        hidden = self.net.embed(batch["words"])
        more = torch.zeros(())
        if self.kind == "square":
            more = (hidden @ hidden.transpose(1, 2)).repeat(1, 1, 4).exp()
        elif self.kind == "sample":
            more = self.head(hidden[:, 0]).exp()
        elif self.kind == "unpadded":  # how many words there are is known only in the step
            return self.head(hidden[batch["words"] != 0]).square().mean()
        return self.net.losses(batch).mean() + 0 * more.mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.mark.parametrize("kind", ["word", "square", "sample"])
def test_the_budget_that_is_found_lasts_an_epoch(kind: str) -> None:
    """Whatever memory grows with; in at most eight steps, and the plan says both limits."""
    with limit_memory("1.5 MB"):
        module, callback = train_horizon("auto", module=Wide(kind), memory_budget="1.5 MB", verify=False, cache=False)
    assert callback.oom_events == 0
    probe, plan = callback.probe, callback.plan
    assert probe.steps <= 8
    assert (plan.size_budget, plan.samples_at_most) == (probe.sizes.budget, min(probe.sizes.samples, EFFECTIVE))
    assert all(rows <= plan.samples_at_most for rows, _ in module.shapes)
    assert (probe.sizes.offset > 0) is (kind == "sample")


def test_limits_are_kept_by_a_checkpoint_and_verified_from_the_cache(tmp_path: Path) -> None:
    """Those of shorter samples with them: one step for each that is verified, none after a resume."""
    path, settings = tmp_path / "last.ckpt", {"memory_budget": "1.5 MB", "verify": False}
    (_, first), (_, again) = (
        train_horizon("auto", SaveAt(path, 2), module=Wide("sample"), **settings) for _ in range(2)
    )
    _, resumed = train_horizon("auto", module=Wide("sample"), ckpt_path=path, **settings)
    assert [each.probe.source for each in (first, again, resumed)] == ["probe", "cache", "checkpoint"]
    assert first.probe.sizes == again.probe.sizes == resumed.probe.sizes
    assert (again.probe.steps, resumed.probe.steps) == (1 + first.probe.steps - 3, 0)  # the search ran three


# --- without sizes: micro-batches of as many samples, whatever is among them -----------------------

LONG = Texts(700)
LONGEST_OF_LONG = 350  # a look at 64 samples from all over the data set sees multiples of 11 and the last
IN_ORDER = sorted(LONG, key=lambda text: len(text["words"]))
LARGER = pytest.mark.loader_only(
    reason="its micro-batches are larger than the loader's batches, which a step only makes smaller"
)


def at(budget: str, kind: str, data: Any, micro_batch: Any = "auto", **settings: Any) -> Any:
    """The probe's result after one epoch, or some steps of it, on an emulated device of this size."""
    effective = 64 if micro_batch == "auto" else 4 * micro_batch  # all micro-batches as large as may be, the last too
    callback = AutoAccumulate(effective, micro_batch_size=micro_batch, on_oom="raise", verify=False, cache=False)
    loader = DataLoader(data, 16, shuffle=data is LONG, collate_fn=pad)
    with limit_memory(budget):
        fit(loader, callback, module=Wide(kind), max_epochs=1, **settings)
    return callback.probe


WORST = {"square": ("1 MB", [LONG[LONGEST_OF_LONG]] * 256), "unpadded": ("800 KB", IN_ORDER[::-1])}


@LARGER
@pytest.mark.parametrize("kind", WORST)
def test_the_longest_samples_are_found_and_decide(kind: str) -> None:
    """An epoch at the limit never runs out; one sample more does as soon as the longest are together."""
    budget, worst = WORST[kind]
    found = at(budget, kind, LONG)
    assert 4 < found.limit < 32
    for micro_batch in (found.limit, found.limit + 1):
        with pytest.raises(torch.OutOfMemoryError) if micro_batch > found.limit else nullcontext():
            at(budget, kind, worst, micro_batch)


@LARGER
def test_samples_that_there_was_no_time_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do about them; a sorted data set is safe, as its first and last samples are always seen."""
    known = at("1 MB", "square", LONG, max_steps=1).limit
    monkeypatch.setattr("lightning_ga.loading.largest.LOOK_SECONDS", -1.0)
    with pytest.warns(UserWarning, match=r"time to read 64 of 700: .*Sort the dataset.*max_micro_batch_size"):
        at("1 MB", "square", LONG, max_steps=1)
    with pytest.warns(UserWarning, match="time to read"):
        assert at("1 MB", "square", IN_ORDER, max_steps=1).limit == known


class Nameless(Dataset):
    """Samples are tuples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index), index


WRONG: list[tuple[Any, str]] = [
    ("tokens", "size_of='tokens' is neither an attribute of the dataset nor of a sample"),
    (lambda data, i: -1, "a size is a whole number of at least 0"),
    (lambda data, i: 0.5, "a size is a whole number of at least 0"),
    (lambda data, i: 2**31 - 1 + (i == 3), "returned for 3 is 2147483648: .* at most 2,147,483,647"),
]


@pytest.mark.parametrize(("size_of", "told"), WRONG)
def test_data_whose_sizes_are_not_known_are_refused(size_of: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        fit(DataLoader(Nameless(), 2), AutoAccumulate(micro_batch_size=1, size_of=size_of))


class Pairs(Sampler[Any]):
    """Yields two indices at a time."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.parametrize("size_of", [length, "auto"])
def test_a_sampler_that_yields_lists_is_refused(size_of: Any) -> None:
    with pytest.raises(UserError, match=r"yields \[0, 1\], a list, and size_of= needs an index for each sample"):
        fit(DataLoader(Nameless(), 2, sampler=Pairs()), AutoAccumulate(micro_batch_size=1, size_of=size_of))


class OfTensors(Sampler[Any]):
    """Yields indices as tensors without axes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.size))


def test_sizes_are_asked_for_by_whole_numbers() -> None:
    """Once for each sample, also if a sampler yields tensors."""
    asked: list[Any] = []

    def size_of(data: Texts, index: Any) -> int:
        asked.append(index)
        return data.lengths[index]

    loader = DataLoader(DATA, 16, sampler=OfTensors(SIZE), collate_fn=pad)
    fit(loader, AutoAccumulate(micro_batch_size=4, size_of=size_of, verify=False), module=Reading("samples"))
    assert sorted(asked) == [*range(SIZE)]
    assert {*map(type, asked)} == {int}


class Holding(Texts):
    """Holds an iterator, so that training alone may read samples."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.numbers = count()

    def __getitem__(self, index: int) -> Any:
        next(self.numbers)
        return super().__getitem__(index)


def test_a_limit_holds_for_samples_that_training_alone_reads() -> None:
    """The probe finds it on the first batch, and no smaller samples are tried."""
    ours = AutoAccumulate(memory_budget="400KB", size_of=length, cache=False)
    fit(DataLoader(Holding(SIZE), 64, shuffle=True, collate_fn=pad), ours, module=Reading("samples"))
    assert ours.probe is not None
    assert ours.plan is not None
    assert ours.probe.limit < 64
    assert ours.probe.sizes == SizeLimits(ours.probe.limit * max(DATA.lengths), ours.probe.limit)
    assert ours.plan.factor > 1


def test_an_error_of_size_of_names_it_and_the_index() -> None:
    with pytest.raises(KeyError) as caught:
        fit(DataLoader(Nameless(), 2), AutoAccumulate(size_of=lambda data, index: {0: 1, 1: 1}[index]))
    assert any("size_of= raised this" in note and "the index 2" in note for note in caught.value.__notes__)


class Lines(Dataset):
    """Samples of one field, of these lengths; maybe with an iterator, so that none is read apart from the rest."""

    def __init__(self, lengths: list[int], held: Any = None) -> None:
        self.lengths = lengths
        self.held = held

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.lengths[index])


class LastOfEpoch(Sampler):
    """Every epoch draws the same samples but for one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter([*range(15), 15 + self.epoch])


def sized(data: Lines, sampler: Any = None) -> LoaderSource:
    """The source of 16 samples an epoch, sized by shape; four of the largest fit."""
    loader = DataLoader(data, 16, sampler=sampler, collate_fn=partial(pad_sequence, batch_first=True))
    source = read_source(loader, SourceSettings(1, 1, 0, SEED), size_of="auto")
    assert isinstance(source, LoaderSource)
    assert source.sizes is not None
    source.sizes.set_limits(4, SizeLimits(4 * source.sizes.largest, 16))
    return source


@pytest.mark.parametrize("lengths", [[10, 20, 30, 40] * 4, [40] * 16])
def test_a_sample_of_a_later_epoch_is_measured_as_those_before(lengths: list[int]) -> None:
    """Along the axes that varied then, or as many times as it is longer, alone if it must be."""
    source = sized(Lines([*lengths, 500, 81]), LastOfEpoch())
    for epoch, longest in enumerate((40, 500, 81)):
        source.arrange(epoch, constant(16), 16)
        shapes = [tuple(batch.shape) for batch in source.loader]
        assert sum(rows for rows, _ in shapes) == 16
        assert max(length for _, length in shapes) == longest
        assert all(rows == 1 or rows * length <= 4 * 40 for rows, length in shapes)


def test_reloaded_data_are_measured_as_those_whose_limits_they_get() -> None:
    first, second = sized(Lines([40] * 16)), sized(Lines([80] * 16))
    second.sizes.__dict__.pop("_sizes")
    second.sizes.follow(first.sizes)
    second.arrange(0, constant(16), 16)
    assert max(len(batch) for batch in second.loader) == 2


@pytest.mark.parametrize("lengths", [[10, 20, 30, 40] * 4, [40] * 16])
def test_the_axes_that_vary_are_those_of_all_samples(lengths: list[int]) -> None:
    """Also if none can be read apart from the rest; what the plan says of padding is true, also if no axis varies."""
    plans = []
    for held in (None, iter([])):
        plans.append(str(sized(Lines(lengths, held)).arrange(0, constant(16), 16)))
    assert plans[0] == plans[1]
    assert "at most 160 tokens each if padded" in plans[0]
    assert ("padding 0 % (was 0 %)" in plans[0]) == (len({*lengths}) == 1)


def test_an_axis_that_varies_late_or_is_missing_counts_for_all() -> None:
    """As in a plain reading of all samples at once."""
    data = [{"image": torch.zeros(3, 8)}] * 70 + [{"image": torch.zeros(3, 5), "text": torch.zeros(9)}]
    sizes = SampleSizes(DataLoader(data), "auto", Sequential(71), 0)
    assert (sizes.largest, len(sizes.by_size), sizes.by_size[0]) == (9, 71, 70)


class Labelled:
    """A column that is read by label, as one of a data frame that was shuffled, and by place with ``iloc``."""

    def __init__(self, values: list[int]) -> None:
        self.iloc = values

    def __len__(self) -> int:
        return len(self.iloc)

    def __getitem__(self, label: int) -> int:
        return self.iloc[-1 - label]


def test_columns_of_data_frames_are_read_by_place() -> None:
    """An attribute that has no length, or one of another thing, is no column."""
    data: Any = Nameless()
    data.column = Labelled([*range(10, 90, 10)])
    data.number = torch.tensor(8)
    size_of = _column(data, "column")
    assert callable(size_of)
    assert [size_of(data, place) for place in range(3)] == [10, 20, 30]
    assert _column(data, "number") == "number"


LENGTHS = [16] * 8 + [1] * 24


class Shorts(Dataset):
    """A few long samples, and many short ones."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LENGTHS[index],), float(index))


class RunsOut(pl.LightningModule):
    """Cannot run one of the short samples with as many others, in its first epoch."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.others = others
        self.passes: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        numbers = batch[:, 0].long().tolist()
        if 20 in numbers and len(numbers) > self.others and self.current_epoch == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.passes.append(numbers)
        return (self.weight * batch[:, 0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.loader_only(reason="the loader alone cuts by size")
@pytest.mark.filterwarnings("ignore:Memory ran out in training:UserWarning")
@pytest.mark.parametrize(("on_oom", "others"), [("split", 3), ("skip", 0)])
def test_many_short_samples_are_no_sample_alone(on_oom: Any, others: int, tmp_path: Path) -> None:
    """As many tokens as the longest sample has: their passes become smaller, and one is left out if it fails alone."""
    collate = partial(pad_sequence, batch_first=True, padding_value=-1.0)
    loader = DataLoader(Shorts(), batch_size=8, collate_fn=collate)
    callback = AutoAccumulate(32, micro_batch_size=4, on_oom=on_oom, size_of=lambda _, i: LENGTHS[i], verify=False)
    module = RunsOut(others)
    fit(loader, callback, module=module, max_epochs=2, default_root_dir=tmp_path)
    if on_oom == "skip":
        trained = sorted(chain.from_iterable(module.passes[-3 - 31 : -3]))
        assert trained == [number for number in range(32) if number != 20]
        assert (tmp_path / "skipped.csv").read_text().splitlines()[1].startswith("0,0,20,20,")
        assert sorted(chain.from_iterable(module.passes[-3:])) == [*range(32)]  # as large as before
    else:
        assert callback.plan is not None
        assert sorted(chain.from_iterable(module.passes[-callback.plan.factor :])) == [*range(32)]
        assert 1 < max(map(len, module.passes[-callback.plan.factor :])) <= others


class Padded(pl.LightningModule):
    """Its loss is a mean over samples, of what padding does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch.double().sum(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def test_each_window_is_looked_at_whose_samples_decide_its_cut() -> None:
    """Windows of 4 + 4, 7 + 1 and 4 + 4 samples, each micro-batch of which has half of the weight."""
    lengths = [*[20] * 4, *[10] * 4, 40, *[10] * 7, *[20] * 4, *[10] * 4]
    data = [torch.ones(length) * (1 + number) for number, length in enumerate(lengths)]
    ours = AutoAccumulate(micro_batch_size=2, size_of=lambda held, index: len(held[index]), normalize=None)
    loader: Any = DataLoader(data, batch_size=8, collate_fn=padded)  # type: ignore[arg-type]
    with pytest.warns(ExactnessWarning, match="normalize=None weighs micro-batches alike"):
        fit(loader, ours, module=Padded(), max_epochs=1)
    assert ours.exactness is not None
    assert ours.exactness.cause == "weighted"


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)
