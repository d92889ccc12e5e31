"""Windows of a number of tokens: the same on any hardware, after a resume too, with the gradients of a plain loop."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rank_records import joined, run_ranks
from reference import Samples, StreamOf, fit, permutation, plain_loop, worst_error
from texts import LONGEST, Reading, Texts, pad, plain_gradients, windows_of
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, optimizer_steps
from lightning_ga.testing import limit_memory
from lightning_ga.weights import TargetTokens

SIZE, SEED, TOKENS = 150, 7, 200
DATA = Texts(SIZE)


def cut(order: Iterable[int], sizes: Any, tokens: int = TOKENS) -> list[list[int]]:
    """The plain way: sample by sample, a new window where the next does not fit."""
    windows: list[list[int]] = []
    held = tokens
    for place in order:
        if not windows or held + sizes[place] > tokens:
            windows, held = [*windows, []], 0
        windows[-1].append(place)
        held += sizes[place]
    return windows


def epoch_of(epoch: int) -> list[list[int]]:
    return cut(permutation(SIZE, SEED, epoch), DATA.lengths)


WINDOWS = [window for epoch in range(2) for window in epoch_of(epoch)]
SORTED = [sorted(window) for window in WINDOWS]


class Horizon(Reading):
    """A schedule that ends with training."""

    steps: float = 0

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(micro_batch: Any = 4, *callbacks: pl.Callback, by: str = "samples", **arguments: Any) -> Any:
    """A fit of two epochs; the module that kept its micro-batches, and the callback."""
    loader = {name: arguments.pop(name) for name in ("drop_last", "num_workers") if name in arguments}
    settings = {name: arguments.pop(name) for name in ("ckpt_path", "max_epochs", "max_steps") if name in arguments}
    module = arguments.pop("module", None) or Horizon(by)
    normalize: Any = TargetTokens() if by == "words" else "samples"
    given = {"effective_batch_size": f"{TOKENS} tokens", "size_of": "lengths", "normalize": normalize, **arguments}
    callback = AutoAccumulate(micro_batch_size=micro_batch, **given)
    data = DataLoader(DATA, 16, shuffle=True, collate_fn=pad, **loader)
    fit(data, callback, *callbacks, module=module, **settings)
    return module, callback


@pytest.mark.parametrize("by", ["samples", "words"])
@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_gradients_are_those_of_a_plain_loop(by: str, micro_batch: int) -> None:
    """For a mean over samples or words; the horizon is the number of windows."""
    module, callback = train(micro_batch, by=by)
    assert windows_of(module.micro_batches) == SORTED
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS, by)) <= 1e-12
    assert all(rows == 1 or rows * columns <= micro_batch * LONGEST for rows, columns in module.shapes)
    assert module.steps == callback.optimizer_steps() == len(WINDOWS) == module.trainer.global_step
    assert callback.exactness.cause == "exact"


def test_the_plan_says_how_windows_and_micro_batches_differ() -> None:
    module, callback = train(4)
    plan, windows, first = callback.plan, epoch_of(1), len(epoch_of(0))
    held = [len(window) for window in windows[:-1]]
    assert (plan.smallest_window, plan.effective_batch_size) == (min(held), max(map(len, windows)))
    factors = [sum(step == first + window for step, _ in module.micro_batches) for window in range(len(windows))]
    assert (plan.fewest_chunks, plan.factor) == (min(factors), max(factors))
    assert f"windows of 200 tokens ({min(held)} to {max(map(len, windows))} samples) in" in str(plan)


def test_sizes_are_found_by_default() -> None:
    """As with ``size_of="auto"``; the number may have separators."""
    module, _ = train(4, max_epochs=1)
    for workers, text in enumerate(("200 tokens", "2_00 tokens", "2,00  tokens")):
        other, _ = train(4, max_epochs=1, effective_batch_size=text, size_of=None, num_workers=workers)
        assert other.micro_batches == module.micro_batches


def test_a_sample_above_the_tokens_is_a_window() -> None:
    module, _ = train(4, effective_batch_size=f"{LONGEST - 1} tokens", max_epochs=1)
    windows = cut(permutation(SIZE, SEED, 0), DATA.lengths, LONGEST - 1)
    assert [DATA.lengths.index(LONGEST)] in windows
    assert windows_of(module.micro_batches) == [sorted(window) for window in windows]
    assert worst_error(module.gradients, plain_gradients(DATA, windows)) <= 1e-12


def test_a_ragged_window_is_dropped_with_drop_last() -> None:
    module, callback = train(4, drop_last=True)
    kept = [window for epoch in range(2) for window in epoch_of(epoch)[:-1]]
    assert windows_of(module.micro_batches) == [sorted(window) for window in kept]
    assert callback.optimizer_steps() == module.steps == len(kept)
    assert worst_error(module.gradients, plain_gradients(DATA, kept)) <= 1e-12


def test_steps_end_training() -> None:
    module, callback = train(4, max_epochs=3, max_steps=5)
    assert windows_of(module.micro_batches) == SORTED[:5]
    assert module.steps == callback.optimizer_steps() == 5


class SaveAt(pl.Callback):
    """A checkpoint after a number of optimizer steps."""

    def __init__(self, path: Path, steps: range) -> None:
        self.path, self.steps = path, steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        path = self.path / f"{trainer.global_step}.ckpt"
        if trainer.global_step in self.steps and not path.exists():
            trainer.save_checkpoint(path)


def test_a_resume_goes_on_with_the_next_window(tmp_path: Path) -> None:
    """After each of them, with another micro-batch."""
    steps = range(1, len(WINDOWS))
    whole, _ = train(4, SaveAt(tmp_path, steps))
    for step in steps:
        resumed, callback = train(7, ckpt_path=tmp_path / f"{step}.ckpt")
        assert windows_of(resumed.micro_batches) == SORTED[step:]
        assert worst_error(resumed.gradients, whole.gradients[step:]) <= 1e-12
        assert callback.optimizer_steps() == len(WINDOWS)


def test_windows_are_the_same_at_a_limit_that_is_found() -> None:
    with limit_memory("300 kB"):
        module, callback = train("auto", memory_budget="300 kB", verify=False, cache=False)
    assert callback.oom_events == 0
    assert callback.plan.factor > 1
    assert callback.probe.limit < max(map(len, WINDOWS))
    assert windows_of(module.micro_batches) == SORTED
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS)) <= 1e-12


class Cramped(Horizon):
    """Memory runs out above so many padded words."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch["words"].numel() > 5 * LONGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out in training:UserWarning")
def test_windows_survive() -> None:
    module, callback = train(8, module=Cramped(), verify=False)
    assert callback.oom_events >= 1
    assert worst_error(module.gradients, plain_gradients(DATA, WINDOWS)) <= 1e-12


def ramp(data: Any, index: int) -> int:
    return 1 + index % 13


@pytest.mark.distributed
def test_ranks_share_the_windows_of_one(tmp_path: Path) -> None:
    """Some hold fewer samples than there are ranks."""
    accumulate = {"effective_batch_size": "15 tokens", "micro_batch_size": 2, "size_of": ramp}
    records = run_ranks(tmp_path, loader="shuffled", size=53, batch_size=4, ranks=2, accumulate=accumulate)
    sizes = [ramp(None, index) for index in range(53)]
    windows = list(chain.from_iterable(cut(permutation(53, 7, epoch), sizes, 15) for epoch in range(2)))
    assert min(map(len, windows)) == 1
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(53), windows)) <= 1e-12


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_resume_on_another_number_of_ranks_goes_on_with_the_next_window(
    before: int, after: int, tmp_path: Path
) -> None:
    """From the middle of an epoch, with another micro-batch; no window is another, and none is cut at its edge."""
    sizes = [ramp(None, index) for index in range(53)]
    windows = list(chain.from_iterable(cut(permutation(53, 7, epoch), sizes, 40) for epoch in range(2)))
    steps = len(windows) // 2 - 2
    for ranks, micro_batch, given in ((before, 2, {"save": True}), (after, 3, {})):
        folder = tmp_path / f"{ranks}"
        given = given or {"ckpt_path": str(tmp_path / f"{before}" / f"step{steps}.ckpt")}
        accumulate = {"effective_batch_size": "40 tokens", "micro_batch_size": micro_batch, "size_of": ramp}
        settings: dict[str, Any] = {"loader": "shuffled", "size": 53, "batch_size": 4, "accumulate": accumulate}
        records = run_ranks(folder, ranks=ranks, **settings, **given)
    assert joined(records)[-len(windows) + steps :] == [sorted(window) for window in windows[steps:]]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(53), windows)[steps:]) <= 1e-12


@pytest.mark.distributed
def test_ranks_with_data_of_their_own_are_refused(tmp_path: Path) -> None:
    accumulate = {"effective_batch_size": "15 tokens", "micro_batch_size": 2, "size_of": ramp}
    with pytest.raises(Exception, match="each rank has an order of its own"):
        run_ranks(
            tmp_path,
            loader="own share",
            size=45,
            batch_size=4,
            ranks=2,
            accumulate=accumulate,
            trainer={"use_distributed_sampler": False},
        )


@pytest.mark.parametrize(
    "value", ["65536", "64k tokens", "0 tokens", "-3 tokens", "tokens", "1e5 tokens", "", "8 token"]
)
def test_what_is_no_number_of_tokens_is_refused(value: str) -> None:
    told = "is neither a number of samples nor, as text, a whole number of tokens of at least 1: write "
    with pytest.raises(UserError, match=f"effective_batch_size='{value}' {told}"):
        AutoAccumulate(value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate": 4},
        {"micro_batching": "step"},
        {"whole": ("net",)},
        {"scale_lr": "linear"},
        {"scale_beta2": True},
    ],
)
def test_what_counts_in_samples_does_not_go_with_tokens(arguments: Any) -> None:
    with pytest.raises(UserError, match="effective_batch_size='64 tokens' and .* do not go together"):
        AutoAccumulate("64 tokens", **arguments)


def test_more_tokens_than_an_epoch_holds_leave_nothing_with_drop_last() -> None:
    with pytest.raises(UserError, match="'100000 tokens' is more than an epoch holds, and drop_last=True"):
        train(4, drop_last=True, effective_batch_size="100000 tokens")
    module, _ = train(100, effective_batch_size="100000 tokens", max_epochs=1)
    assert windows_of(module.micro_batches) == [list(range(SIZE))]


def test_data_that_tokens_cannot_be_counted_of_are_refused() -> None:
    """Streams, and samples of one size with no name for it: each would count as one token."""
    equal = DataLoader([{"words": torch.ones(5), "labels": torch.ones(5)} for _ in range(8)], 2)
    with pytest.raises(UserError, match="'64 tokens' needs sizes, and no extent varies among the samples"):
        fit(equal, AutoAccumulate("64 tokens", micro_batch_size=1))
    stream = DataLoader(StreamOf(DATA), 2, collate_fn=pad)
    with pytest.raises(UserError, match="'64 tokens' decides by index .* and a stream has no indices"):
        fit(stream, AutoAccumulate("64 tokens", micro_batch_size=1))


def test_a_part_of_an_epoch_and_an_order_of_the_users_own() -> None:
    """What limit_train_batches lets through, in the order of a sampler: the last window ends there."""
    order = [7 * place % SIZE for place in range(SIZE)]
    data = DataLoader(DATA, 16, sampler=order, collate_fn=pad)
    module, callback = Horizon(), AutoAccumulate("200 tokens", micro_batch_size=4, size_of="lengths")
    fit(data, callback, module=module, limit_train_batches=5)
    windows = cut(order[:80], DATA.lengths) * 2
    assert windows_of(module.micro_batches) == [sorted(window) for window in windows]
    assert worst_error(module.gradients, plain_gradients(DATA, windows)) <= 1e-12
    assert module.steps == len(windows)


def test_a_resume_from_windows_of_another_kind_goes_on_at_its_sample(tmp_path: Path) -> None:
    train(4, SaveAt(tmp_path, range(1, 2)), effective_batch_size=50)
    module, _ = train(4, ckpt_path=tmp_path / "1.ckpt")
    left = cut(permutation(SIZE, SEED, 0)[50:], DATA.lengths)
    windows = [*left, *epoch_of(1)]
    assert windows_of(module.micro_batches) == [sorted(window) for window in windows]
