"""Ranks with unequal memory, and ranks in trouble: they agree, go on together, or end with an error."""

import os
import warnings
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, on_ranks, start
from reference import Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.schedule import by_step
from lightning_ga.testing import limit_memory

pytestmark = pytest.mark.distributed
SMALL, LARGE = 6000, 12000
VOTES = 128  # bytes of votes that may still be on their way when memory is counted


class Troubled(Regression):
    """Keeps no tensors of its own, as memory is counted; the second rank fails above a size, or dies."""

    fails_from = 0  # optimizer steps on

    def __init__(self, fails_above: float, dies_above: float) -> None:
        super().__init__()
        self.fails_above, self.dies_above = fails_above, dies_above
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        size = len(batch[0]) if self.global_rank == 1 else 0
        if size > self.dies_above:
            os._exit(17)
        if size > self.fails_above and self.trainer.global_step >= self.fails_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.sizes.append(len(batch[0]))
        return loss(self.net, batch[0], batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def trained(
    budgets: tuple[int, int], effective: int = 128, fails_above: float = inf, dies_above: float = inf
) -> dict[str, Any]:
    """What this rank records of a fit with its budget."""
    module, callback = Troubled(fails_above, dies_above), AutoAccumulate(effective, verify=False, cache=False)
    loader = DataLoader(Samples(256), 32, shuffle=True)
    with limit_memory(budgets[int(os.environ["RANK"])]):
        fit(loader, callback, module=module, **ddp())
    probe = callback.probe
    return {
        "limit": probe.limit,
        "spare": probe.budget_bytes - probe.peak_bytes,
        "trials": [(trial.micro_batch_size, trial.fits) for trial in probe.trials],
        "sizes": module.sizes,
        "weights": torch.cat([parameter.detach().flatten() for parameter in module.parameters()]),
    }


GROWING = by_step({0: 8, 2: 112})


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def grown(budgets: tuple[int, int], fails_above: float, micro_batch: Any = "auto") -> dict[str, Any]:
    """What this rank records of a fit whose windows grow in its third step."""
    module = Troubled(fails_above, inf)
    module.fails_from = 1
    callback = AutoAccumulate(GROWING, micro_batch_size=micro_batch, verify=False, cache=False)
    loader = DataLoader(Samples(128), 8)
    with limit_memory(budgets[int(os.environ["RANK"])]):
        fit(loader, callback, module=module, max_epochs=1, **ddp())
    probe = callback.probe
    limit = None if probe is None else probe.limit
    return {"sizes": module.sizes, "limit": limit, "weights": weights_of(module)}


@pytest.mark.parametrize("fails_above", [inf, 3])
def test_ranks_ask_together_about_windows_that_have_grown(fails_above: float, tmp_path: Path) -> None:
    """One with less memory, or one that has met an error before: its limit is that of both from there on."""
    whole = on_ranks(grown, tmp_path / "whole", (10**6, 10**6), inf, 56)
    records = on_ranks(grown, tmp_path / "asked", (LARGE, SMALL), fails_above)
    for record in records:
        assert torch.allclose(record["weights"], whole[0]["weights"], rtol=0, atol=1e-12)
    limits = [record["limit"] for record in records]
    if fails_above == inf:
        assert limits[0] == limits[1] < 56
        assert max(records[0]["sizes"][-3:]) <= limits[0]
    else:
        assert limits == [None, None]  # the error has shown the limit
        assert [record["sizes"][-28:] for record in records] == [[2] * 28] * 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks with little memory."""
    return on_ranks(trained, tmp_path_factory.mktemp("small"), (SMALL, SMALL))


def test_the_rank_with_less_memory_decides(tmp_path: Path, small: list[dict[str, Any]]) -> None:
    """Both end with its limit, run the same trials, and train to the same weights within their memory."""
    unequal = on_ranks(trained, tmp_path / "unequal", (LARGE, SMALL))
    large = on_ranks(trained, tmp_path / "large", (LARGE, LARGE))
    assert unequal[0]["limit"] == unequal[1]["limit"] == small[0]["limit"] < large[0]["limit"] < 64
    for records in (unequal, small, large):
        assert records[0]["trials"] == records[1]["trials"]
        assert max(max(record["sizes"]) for record in records) <= records[0]["limit"]
        assert torch.equal(records[0]["weights"], records[1]["weights"])


def test_training_at_the_limit_has_room_to_exchange_gradients(tmp_path: Path, small: list[dict[str, Any]]) -> None:
    budget, limit = SMALL - small[0]["spare"] + VOTES, small[0]["limit"]
    for record in on_ranks(trained, tmp_path, (budget, budget), 2 * 3 * limit):
        assert record["limit"] == limit
        assert record["spare"] <= 2 * VOTES  # on their way in the one run, in the other, or in neither
        assert record["sizes"].count(limit) > 6


def test_running_out_of_memory_on_one_rank_is_every_ranks_limit(tmp_path: Path) -> None:
    records = on_ranks(trained, tmp_path, (10**6, 10**6), 128, 21)
    assert [record["limit"] for record in records] == [21, 21]
    assert records[0]["trials"] == records[1]["trials"]
    assert torch.equal(records[0]["weights"], records[1]["weights"])


def test_a_rank_that_dies_in_a_trial_ends_the_run_with_an_error(tmp_path: Path) -> None:
    assert start(trained, tmp_path, (LARGE, LARGE), 128, inf, 4).code == 17
    assert not list(tmp_path.glob("rank*.pt"))


class OfFour(Regression):
    """Trains on the four largest errors of a batch: with fewer samples, its step raises."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        errors = (self.net(batch[0]).flatten() - batch[1].flatten()).square()
        return errors.topk(4).values.mean()


def trained_on_four() -> tuple[int, list[str]]:
    """Optimizer steps of a fit whose trial step fails on both ranks, and what is said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, trainer = fit(DataLoader(Samples(64), 16), AutoAccumulate(cache=False), module=OfFour(), **ddp())
    return trainer.global_step, [str(each.message) for each in said if "The probe found no limit" in str(each.message)]


def test_ranks_train_as_their_recipe_says_if_a_trial_step_fails_on_them(tmp_path: Path) -> None:
    """They fail together, and no rank waits for another's vote."""
    (steps, said), (others, _) = on_ranks(trained_on_four, tmp_path)
    assert steps == others > 0
    assert len(said) == 1
    assert "ended in RuntimeError: selected index k out of range" in said[0]
