"""``shares="memory"`` and ``"speed"``: unequal ranks share a window in proportion; its gradient stays the same."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, joined, on_ranks
from reference import Regression, Samples, SaveAll, StreamOf, Validated, cut, fit, permutation, plain_loop, worst_error
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.probe import speed
from lightning_ga.testing import limit_memory

EFFECTIVE = 36
SIZE = 100  # the last window has 28 samples


class Wide(Regression):
    """Memory runs out above some samples on this rank, once."""

    fails_above = 1000

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > self.fails_above and self.trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def of_rank(limits: tuple[int, ...], fails: bool) -> dict[str, Any]:
    """What this rank records of a fit with a limit of its own."""
    rank = int(os.environ["RANK"])
    module = Wide()
    if fails and rank == 0:
        module.fails_above = 5
    ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=limits[rank], shares="memory", verify=False)
    fit(DataLoader(Samples(SIZE), 8, shuffle=True), ours, module=module, **ddp())
    sizes = [len(indices) for step, indices in module.micro_batches if step == 0]
    plan = str(ours.plan)
    return {
        "windows": module.windows,
        "gradients": module.gradients,
        "sizes": sizes,
        "plan": plan,
        "n": ours.oom_events,
    }


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize(
    ("limits", "fails", "sizes"),
    [
        ((24, 12), False, [[24], [12]]),
        ((8, 4), True, [[8, 8, 8], [4, 4, 4]]),
        ((10, 3), False, [[10, 9, 9], [3, 3, 2]]),
        ((12, 4, 2), False, [[12, 12], [4, 4], [2, 2]]),
    ],
)
def test_ranks_share_a_window_in_proportion(
    limits: tuple[int, ...], fails: bool, sizes: list[list[int]], tmp_path: Path
) -> None:
    """The windows are those of seed and epoch; also if a rank runs a window again alone, and after it."""
    records = on_ranks(of_rank, tmp_path, limits, fails, ranks=len(limits))
    assert [each["sizes"] for each in records] == sizes
    windows = [w for epoch in range(2) for w in cut(permutation(SIZE, 7, epoch), EFFECTIVE)]
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(SIZE), windows)) <= 1e-12
    assert [each["n"] for each in records] == [int(fails), *[0] * (len(limits) - 1)]
    assert fails or "in shares of" in records[0]["plan"]


def with_own_memory(budgets: tuple[str, ...]) -> dict[str, Any]:
    """What this rank records if its memory decides."""
    module = Regression()
    ours = AutoAccumulate(effective_batch_size=400, shares="memory", cache=False)
    data = Samples(800)
    with limit_memory(budgets[int(os.environ["RANK"])]):
        fit(DataLoader(data, 8, shuffle=True), ours, module=module, max_epochs=1, **ddp())
    probe = ours.probe
    assert probe is not None
    return {"windows": module.windows, "gradients": module.gradients, "limit": probe.limit, "n": ours.oom_events}


@pytest.mark.distributed
def test_each_rank_finds_its_own_limit(tmp_path: Path) -> None:
    one, other = records = on_ranks(with_own_memory, tmp_path, ("60KiB", "30KiB"))
    assert one["limit"] > 1.5 * other["limit"]
    assert one["n"] == other["n"] == 0
    assert len(one["windows"][0]) / len(other["windows"][0]) == pytest.approx(one["limit"] / other["limit"], rel=0.03)
    windows = cut(permutation(800, 7, 0), 400)
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(800), windows)) <= 1e-12


def growing_without_end() -> dict[str, Any]:
    """What this rank records if windows grow in an epoch that was not known at the start, and one rank has failed."""
    module = Wide()
    if os.environ["RANK"] == "1":
        module.fails_above = 2
    ours = AutoAccumulate({0: 16, 2: 32}, shares="memory", verify=False, cache=False)
    fit(DataLoader(Samples(96), 8, shuffle=True), ours, module=module, max_epochs=-1, max_steps=15, **ddp())
    return {"windows": module.windows, "gradients": module.gradients, "n": ours.oom_events}


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
def test_a_rank_asks_about_grown_windows_alone(tmp_path: Path) -> None:
    """A rank whose limit an error has shown does not ask, and the others do not wait for it."""
    records = on_ranks(growing_without_end, tmp_path)
    assert [each["n"] for each in records] == [0, 2]
    windows = []
    for epoch, effective in enumerate((16, 16, 32)):
        windows += cut(permutation(96, 7, epoch), effective)
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(96), windows)) <= 1e-12


class Paced(Wide):
    """Takes seconds for each sample, by a clock of its own; ranks wait for long where they exchange a logged value."""

    now = 0.0
    seconds = 1.0

    def on_train_start(self) -> None:
        stock = self.trainer.strategy.reduce

        def reduce(*arguments: Any, **settings: Any) -> Any:
            self.now += 1000.0
            return stock(*arguments, **settings)

        self.trainer.strategy.reduce = reduce

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.now += self.seconds * len(batch[0])
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss


PACED = 36 * 60 + 28  # samples of 61 windows


def paced(seconds: tuple[float, ...], epochs: int, size: int, fails: bool) -> dict[str, Any]:
    """What this rank records if it takes so many seconds for a sample."""
    rank = int(os.environ["RANK"])
    module = Paced()
    module.seconds = seconds[rank]
    if fails and rank == 0:
        module.fails_above = 5
    speed.clock = lambda: module.now
    ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=10, shares="speed", verify=False)
    fit(DataLoader(Samples(size), 8, shuffle=True), ours, module=module, max_epochs=epochs, **ddp())
    return {
        "windows": module.windows,
        "gradients": module.gradients,
        "shares": [len(window) for window in module.windows],
        "plan": str(ours.plan),
        "n": ours.oom_events,
    }


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize(
    ("seconds", "epochs", "size", "fails", "shares", "plan"),
    [
        ((1.0, 2.0), 2, PACED, False, [24, 12], "24 in 3 × 8, 12 in 2 × 6"),  # in mid-epoch
        ((1.0, 2.0), 2, PACED, True, [24, 12], "24 in 5 × 5, 12 in 2 × 6"),
        ((1.0, 1.0), 2, PACED, False, [18, 18], "36 = 9 × 2 × 2"),
        ((1.0, 1.5, 3.0), 11, EFFECTIVE * 10, False, [18, 12, 6], "18 in 2 × 9, 12 in 2 × 6, 6 in 1 × 6"),
        ((1.0, 500.0), 2, PACED, False, [36, 1], ""),
    ],
)
def test_shares_follow_speeds_once_in_50_windows(
    seconds: tuple[float, ...], epochs: int, size: int, fails: bool, shares: list[int], plan: str, tmp_path: Path
) -> None:
    """The windows are those of seed and epoch; also if a rank has run a window again alone."""
    count = len(seconds)
    records = on_ranks(paced, tmp_path, seconds, epochs, size, fails, ranks=count)
    for rank, record in enumerate(records):
        assert record["shares"][:50] == [EFFECTIVE // count] * 50
        assert record["shares"][50:60] == [shares[rank]] * 10
    windows = [w for epoch in range(epochs) for w in cut(permutation(size, 7, epoch), EFFECTIVE)]
    assert joined(records) == [sorted(window) for window in windows]
    oracle = plain_loop(Samples(size), windows)
    for record in records:
        assert worst_error(record["gradients"], oracle) <= 1e-12
    assert [each["n"] for each in records] == [int(fails), *[0] * (count - 1)]
    assert plan in records[0]["plan"]


def resumed(seconds: tuple[float, ...], steps: int, folder: Path) -> dict[str, Any]:
    """What this rank records of a training that stops within an epoch, and of one that continues it."""
    rank = int(os.environ["RANK"])
    modules = [Paced(), Paced()]
    for number, module in enumerate(modules):
        module.seconds = seconds[rank]
        speed.clock = lambda clock=module: clock.now
        ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=10, shares="speed", verify=False)
        more = {"ckpt_path": folder / f"step{steps}.ckpt", "max_epochs": 1} if number else {"max_steps": steps}
        loader = DataLoader(Samples(PACED), 8, shuffle=True)
        fit(loader, ours, SaveAll(folder, {steps}), module=module, **more, **ddp())
    first, second = modules
    windows = first.windows + second.windows[steps:]
    return {"windows": windows, "gradients": first.gradients + second.gradients, "shares": [*map(len, windows)]}


@pytest.mark.distributed
def test_a_resume_begins_with_equal_shares_at_its_sample(tmp_path: Path) -> None:
    records = on_ranks(resumed, tmp_path, (1.0, 2.0), 52, tmp_path)
    assert [each["shares"][50:54] for each in records] == [[24, 24, 18, 18], [12, 12, 18, 18]]
    windows = cut(permutation(PACED, 7, 0), EFFECTIVE)
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(PACED), windows)) <= 1e-12


def validated(shares: str) -> list[int]:
    """The steps after which this rank is validated."""
    limit = (24, 4)[int(os.environ["RANK"])]
    module = Validated()
    ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=limit, shares=shares, verify=False)
    fit(DataLoader(Samples(SIZE), 8, shuffle=True), ours, module=module, val_check_interval=2, **ddp())
    return module.steps_at_validation


@pytest.mark.distributed
@pytest.mark.parametrize("shares", ["memory", "speed"])
def test_ranks_are_validated_together(shares: str, tmp_path: Path) -> None:
    """Each second batch of the recipe, at the end of its window, though ranks run one and three micro-batches."""
    assert on_ranks(validated, tmp_path, shares) == [[1, 2, 3, 4, 5, 6]] * 2


class Hooked(Regression):
    """A communication hook sends its gradients."""

    def on_fit_start(self) -> None:
        self.trainer.strategy.model.register_comm_hook(None, allreduce_hook)


def refused(shares: str, kind: type[Regression], settings: dict[str, Any]) -> str:
    """The sentence in which a training on this rank ends."""
    with pytest.raises(UserError) as error:
        ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=8, shares=shares)
        fit(DataLoader(Samples(SIZE), 8), ours, module=kind(), **ddp(), **settings)
    return str(error.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shares", "kind", "settings", "said"),
    [
        ("memory", Regression, {"max_time": "00:01:00:00"}, "by their memory, and max_time= or .* wait for each other"),
        ("speed", Hooked, {}, "by their speed, and a communication hook"),
    ],
)
def test_ranks_that_wait_within_a_window_are_refused(
    shares: str, kind: type[Regression], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for sentence in on_ranks(refused, tmp_path, shares, kind, settings):
        assert re.search(said, sentence)


def test_shares_need_ranks_and_windows_of_the_loader() -> None:
    with pytest.raises(UserError, match=r"shares='memory' .* this training has one rank: leave it out"):
        fit(DataLoader(Samples(8), 4), AutoAccumulate(shares="memory"))
    with pytest.raises(UserError, match="do not go together"):
        AutoAccumulate(shares="memory", micro_batching="step")
    with pytest.raises(UserError, match="do not go together"):
        AutoAccumulate(shares="memory", accumulate=2)


def stream() -> str:
    """The sentence in which a stream on this rank ends."""
    with pytest.raises(UserError) as error:
        fit(DataLoader(StreamOf(Samples(8)), 4), AutoAccumulate(shares="memory"), **ddp())
    return str(error.value)


@pytest.mark.distributed
def test_a_stream_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(stream, tmp_path):
        assert "needs windows that the loader cuts" in said
