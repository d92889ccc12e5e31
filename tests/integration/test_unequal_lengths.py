"""Windows that are cut by the sizes of their samples, or hold a number of tokens: the same windows on any hardware.

The oracle of windows and gradients is a plain loop, in which each window is one padded batch.
"""

from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_records import joined, run_ranks
from reference import Samples, SaveAt, StreamOf, cut, fit, permutation, plain_loop, worst_error
from texts import LONGEST, Reader, Reading, Texts, pad, plain_gradients, windows_of
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_ga import AutoAccumulate, UserError, optimizer_steps
from lightning_ga.schedule import by_step
from lightning_ga.testing import limit_memory
from lightning_ga.weights import TargetTokens

SIZE, EFFECTIVE, TOKENS, SEED = 150, 64, 200, 7  # three windows of samples an epoch, the last of 22
DATA = Texts(SIZE)


def cut_by_tokens(order: Iterable[int], sizes: Any = DATA.lengths, tokens: int = TOKENS) -> list[list[int]]:
    """The plain way: sample by sample, a new window where the next does not fit."""
    windows: list[list[int]] = []
    held = tokens
    for place in order:
        if not windows or held + sizes[place] > tokens:
            windows, held = [*windows, []], 0
        windows[-1].append(place)
        held += sizes[place]
    return windows


def order(epoch: int) -> list[int]:
    return permutation(SIZE, SEED, epoch)


def epochs(count: int, tokens: bool = False) -> list[list[int]]:
    """The windows of so many epochs."""
    by_epoch = (cut_by_tokens(order(epoch)) if tokens else cut(order(epoch), EFFECTIVE) for epoch in range(count))
    return list(chain.from_iterable(by_epoch))


def in_any_order(windows: Iterable[list[int]]) -> list[list[int]]:
    return [sorted(window) for window in windows]


def length(data: Texts, index: int) -> int:
    return data.lengths[index]


class Horizon(Reading):
    """A schedule that ends with training."""

    steps: float = 0

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(pl.LightningDataModule):
    """Counts its loaders."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.loaders = {"shuffle": True, **settings}, 0

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return DataLoader(DATA, 16, collate_fn=pad, **self.settings)


OF_LOADERS = ("num_workers", "drop_last", "sampler", "shuffle")
OF_TRAINERS = ("ckpt_path", "max_epochs", "max_steps", "limit_train_batches", "reload_dataloaders_every_n_epochs")


def train(micro_batch: Any = 4, *callbacks: pl.Callback, by: str = "samples", **arguments: Any) -> Any:
    """A fit of two epochs; the module that kept its micro-batches, and the callback."""
    data = Data({name: arguments.pop(name) for name in OF_LOADERS if name in arguments})
    settings = {name: arguments.pop(name) for name in OF_TRAINERS if name in arguments}
    module = arguments.pop("module", None) or Horizon(by)
    normalize: Any = TargetTokens() if by == "words" else "samples"
    given = {"effective_batch_size": EFFECTIVE, "size_of": length, "normalize": normalize, **arguments}
    callback = AutoAccumulate(micro_batch_size=micro_batch, **given)
    fit(data, callback, *callbacks, module=module, **settings)
    return module, callback


def by_tokens(micro_batch: Any = 4, *callbacks: pl.Callback, tokens: int = TOKENS, **arguments: Any) -> Any:
    """The same in windows of a number of tokens."""
    given = {"effective_batch_size": f"{tokens} tokens", "size_of": "lengths", **arguments}
    return train(micro_batch, *callbacks, **given)


def are(windows: list[list[int]], module: Any, by: str = "samples") -> None:
    """Windows and gradients are those of a plain loop."""
    assert windows_of(module.micro_batches) == in_any_order(windows)
    assert worst_error(module.gradients, plain_gradients(DATA, windows, by)) <= 1e-12


KINDS = pytest.mark.parametrize(("run", "tokens"), [(train, False), (by_tokens, True)], ids=["samples", "tokens"])


@KINDS
def test_no_pass_has_more_than_the_longest_samples_take(run: Any, tokens: bool) -> None:
    """In padded words; the plan says how many, and how many steps follow."""
    module, callback = run(4, by="words")
    are(epochs(2, tokens), module, "words")
    assert all(rows == 1 or rows * columns <= 4 * LONGEST for rows, columns in module.shapes)
    assert callback.plan.size_budget == 4 * LONGEST
    assert module.steps == callback.optimizer_steps() == module.trainer.global_step
    assert callback.exactness.cause == "exact"


def test_passes_and_padding_are_fewer() -> None:
    """Than in the order of the samples, at the same most padded words of a pass; as the plan says."""
    by_size, callback = train(4)
    as_drawn, _ = train(4, size_of=None)
    assert len(by_size.shapes) <= len(as_drawn.shapes) / 2
    padded = [sum(rows * columns for rows, columns in module.shapes) for module in (by_size, as_drawn)]
    assert padded[0] < 0.7 * padded[1]
    second = [
        [shape for (step, _), shape in zip(module.micro_batches, module.shapes) if step >= 3]
        for module in (by_size, as_drawn)
    ]  # the epoch that the plan is of
    plan, counts, held = callback.plan, [rows for rows, _ in second[0]], sum(DATA.lengths)
    assert (min(counts), max(counts)) == (plan.fewest_samples, plan.micro_batch_size)
    assert max(rows * columns for rows, columns in second[0]) == plan.most_padded
    padding = [1 - held / sum(rows * columns for rows, columns in epoch) for epoch in second]
    assert [plan.padding, plan.padding_as_drawn] == pytest.approx(padding)


class Estimated(Reading):
    """Its schedule ends after as many steps as Lightning estimates, from the windows of one epoch."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_schedule_that_ends_too_early_is_told_of() -> None:
    """Epochs hold other numbers of windows; Lightning counts those of the first for all."""
    steps = sum(len(cut_by_tokens(order(epoch), tokens=60)) for epoch in range(3))
    told = pytest.warns(UserWarning, match=f"OneCycleLR ends after {steps - 2} steps and training takes {steps}: make")
    with told, pytest.raises(ValueError, match="Tried to step"):
        by_tokens(tokens=60, module=Estimated(), max_epochs=3)


def test_the_plan_says_how_windows_of_tokens_differ() -> None:
    module, callback = by_tokens()
    plan, windows, first = callback.plan, cut_by_tokens(order(1)), len(cut_by_tokens(order(0)))
    held = [len(window) for window in windows[:-1]]
    assert (plan.smallest_window, plan.effective_batch_size) == (min(held), max(map(len, windows)))
    factors = [sum(step == first + window for step, _ in module.micro_batches) for window in range(len(windows))]
    assert (plan.fewest_chunks, plan.factor) == (min(factors), max(factors))
    assert f"windows of 200 tokens ({min(held)} to {max(map(len, windows))} samples) in" in str(plan)


def test_a_largest_micro_batch_bounds_the_samples() -> None:
    module, callback = train(4, max_micro_batch_size=6)
    assert max(rows for rows, _ in module.shapes) == callback.plan.samples_at_most == 6
    are(epochs(2), module)


@pytest.mark.parametrize(("size_of", "num_workers"), [("lengths", 0), ("words", 0), ("auto", 1)])
def test_sizes_by_name(size_of: str, num_workers: int) -> None:
    """A column of the dataset, a field of its samples, or the extent that varies: the same micro-batches."""
    module, _ = train(4, size_of=size_of, num_workers=num_workers, max_epochs=1)
    assert module.micro_batches == train(4, max_epochs=1)[0].micro_batches


def test_sizes_of_tokens_are_found_by_default() -> None:
    """As with ``size_of="auto"``; the number may have separators."""
    module, _ = by_tokens(max_epochs=1)
    for text in ("2_00 tokens", "2,00  tokens"):
        other, _ = train(max_epochs=1, effective_batch_size=text, size_of=None)
        assert other.micro_batches == module.micro_batches


def test_a_sample_above_the_tokens_is_a_window() -> None:
    module, _ = by_tokens(tokens=LONGEST - 1, max_epochs=1)
    windows = cut_by_tokens(order(0), tokens=LONGEST - 1)
    assert [DATA.lengths.index(LONGEST)] in windows
    are(windows, module)


def test_training_may_end_before_its_last_window() -> None:
    """Ragged ones are dropped with ``drop_last``; steps, and a part of an epoch in an order of one's own, end it."""
    module, callback = by_tokens(drop_last=True)
    are([window for epoch in range(2) for window in cut_by_tokens(order(epoch))[:-1]], module)
    assert callback.optimizer_steps() == module.steps == module.trainer.global_step
    module, callback = by_tokens(max_epochs=3, max_steps=5)
    are(epochs(1, tokens=True)[:5], module)
    assert module.steps == callback.optimizer_steps() == 5
    own = [7 * place % SIZE for place in range(SIZE)]
    module, _ = by_tokens(sampler=own, shuffle=False, limit_train_batches=5)
    are(cut_by_tokens(own[:80]) * 2, module)
    assert module.steps == module.trainer.global_step


def test_a_resume_from_windows_of_another_kind_goes_on_at_its_sample(tmp_path: Path) -> None:
    train(4, SaveAt(tmp_path / "1.ckpt", 1), effective_batch_size=50)
    module, _ = by_tokens(ckpt_path=tmp_path / "1.ckpt")
    windows = [*cut_by_tokens(order(0)[50:]), *cut_by_tokens(order(1))]
    assert windows_of(module.micro_batches) == in_any_order(windows)


class Cramped(Horizon):
    """Memory runs out above so many padded words."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch["words"].numel() > 5 * LONGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


@KINDS
@pytest.mark.parametrize("reload", [0, 1])
def test_windows_survive_and_the_next_epoch_keeps_below(reload: int, run: Any, tokens: bool) -> None:
    """The limit counts samples × longest, also of a loader that is made anew: short samples are not cut to as few."""
    settings = {"reload_dataloaders_every_n_epochs": reload, "max_epochs": 3}
    with pytest.warns(UserWarning, match="from now on none has more samples × longest"):
        module, callback = run(8, module=Cramped(), verify=False, **settings)
    assert callback.oom_events == 1
    are(epochs(3, tokens), module)
    assert callback.plan.size_budget <= 5 * LONGEST
    later = [shape for (step, _), shape in zip(module.micro_batches, module.shapes) if step >= len(epochs(1, tokens))]
    assert max(rows for rows, _ in later) > 5
    assert max(rows * columns for rows, columns in later) <= callback.plan.size_budget


def ramp(data: Any, index: int) -> int:
    return 1 + index % 13


OF_OWN_ORDER = [[*one, *other] for one, other in zip(cut(range(0, 45, 2), 4), cut(range(1, 45, 2), 4))] * 2
OF_FEW = [w for e in range(2) for w in cut_by_tokens(permutation(53, 7, e), [ramp(None, i) for i in range(53)], 15)]
ROWS: dict[str, Any] = {
    "windows of fewer samples than ranks": (53, OF_FEW, {}, "15 tokens"),
    "orders of the ranks' own": (
        *(45, OF_OWN_ORDER),
        *({"loader": "own share", "trainer": {"use_distributed_sampler": False}}, None),
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ROWS)
def test_ranks_share_windows_out_by_size(name: str, tmp_path: Path) -> None:
    """As many micro-batches on each, the same windows and gradients as in one pass."""
    size, windows, settings, effective = ROWS[name]
    accumulate = {"effective_batch_size": effective, "micro_batch_size": 2, "size_of": ramp}
    records = run_ranks(tmp_path, ranks=2, size=size, batch_size=4, accumulate=accumulate, **settings)
    assert joined(records) == in_any_order(windows)
    assert len({len(record["micro_batches"]) for record in records}) == 1
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12
        for _, indices in record["micro_batches"]:
            assert len(indices) == 1 or len(indices) * max(ramp(None, i) for i in indices) <= 2 * 13


class Nameless(Dataset):
    """Samples are tuples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index), index


class Own(BatchSampler):
    """A batch sampler of the user's own."""


def sized(loader: Any = None, size_of: Any = ramp, effective: Any = None) -> None:
    loader = DataLoader(Nameless(), 2) if loader is None else loader
    fit(loader, AutoAccumulate(effective, micro_batch_size=1, size_of=size_of))


OWN_BATCHES = DataLoader(Nameless(), batch_sampler=Own(range(8), 2, False))
EQUAL = DataLoader([{"words": torch.ones(5), "labels": torch.ones(5)} for _ in range(8)], 2)
STREAM = DataLoader(StreamOf(Nameless()), 2)
OF_DATA: list[tuple[dict[str, Any], str]] = [
    ({"size_of": "tokens"}, "size_of='tokens' is neither an attribute of the dataset nor of a sample"),
    ({"size_of": lambda data, i: -1}, "a size is a whole number of at least 0"),
    ({"size_of": lambda data, i: 0.5}, "a size is a whole number of at least 0"),
    ({"size_of": lambda data, i: 2**31 - 1 + (i == 3)}, "returned for 3 is 2147483648: .* at most 2,147,483,647"),
    ({"size_of": lambda data, i: 2**63}, "returned for 0 is 9223372036854775808: .* at most 2,147,483,647"),
    ({"loader": STREAM}, "a stream has no indices: name what .*='attention_mask', or leave size_of="),
    ({"loader": OWN_BATCHES}, 'the batch sampler Own decides that: name what .* with micro_batching="step", or leave'),
    ({"loader": [1, 2, 3]}, "The training data is a list"),
    ({"loader": EQUAL, "size_of": None, "effective": "64 tokens"}, "needs sizes, and no extent varies among the samp"),
    ({"loader": STREAM, "size_of": None, "effective": "64 tokens"}, "decides by index .* and a stream has no indices"),
]


@pytest.mark.parametrize(("arguments", "told"), OF_DATA)
def test_data_whose_sizes_are_not_known_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        sized(**arguments)


def test_an_error_of_size_of_names_it_and_the_index() -> None:
    with pytest.raises(KeyError) as caught:
        sized(size_of=lambda data, index: {0: 1, 1: 1}[index])
    assert any("size_of= raised this" in note and "the index 2" in note for note in caught.value.__notes__)


NO_TOKENS = "is neither a number of samples nor, as text, a whole number of tokens of at least 1: write "


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
        *(
            ({"effective_batch_size": "64 tokens", **more}, "effective_batch_size='64 tokens' and .* do not go toget")
            for more in (
                *({"accumulate": 4}, {"micro_batching": "step"}, {"whole": ("net",)}),
                *({"scale_lr": "linear"}, {"scale_beta2": True}),
            )
        ),
        *(
            ({"effective_batch_size": text}, f"effective_batch_size='{text}' {NO_TOKENS}")
            for text in ("65536", "64k tokens", "0 tokens", "-3 tokens", "tokens", "1e5 tokens", "", "8 token")
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        AutoAccumulate(**arguments)


def test_more_tokens_than_an_epoch_holds_leave_nothing_with_drop_last() -> None:
    with pytest.raises(UserError, match="'100000 tokens' is more than an epoch holds, and drop_last=True"):
        by_tokens(drop_last=True, tokens=100_000)
    module, _ = by_tokens(100, tokens=100_000, max_epochs=1)
    assert windows_of(module.micro_batches) == [list(range(SIZE))]


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
        hidden = self.net.embed(batch["words"])
        more = torch.zeros(())
        if self.kind == "square":
            more = (hidden @ hidden.transpose(1, 2)).repeat(1, 1, 4).exp()
        elif self.kind == "sample":
            more = self.head(hidden[:, 0]).exp()
        return self.net.losses(batch).mean() + 0 * more.mean()

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


def test_windows_of_tokens_are_the_same_at_a_limit_that_is_found() -> None:
    with limit_memory("300 kB"):
        module, callback = by_tokens("auto", memory_budget="300 kB", verify=False, cache=False)
    assert callback.oom_events == 0
    assert callback.plan.factor > 1
    are(epochs(2, tokens=True), module)


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


def test_throughput_decides_the_number_of_micro_batches_by_what_a_pass_costs() -> None:
    """Measured from windows of several sizes; the windows and gradients are the same."""
    settings = {"memory_budget": "800 kB", "cache": False, "objective": "throughput"}
    _, callback = train("auto", module=Wide("word"), verify=False, max_epochs=1, **settings)
    assert callback.probe.sizes.pass_cost is not None
    assert len(callback.probe.timings) > 1
    module, _ = train("auto", max_epochs=1, **{**settings, "memory_budget": "250 kB"})
    are(epochs(1), module)
