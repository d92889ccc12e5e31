"""When an out-of-memory error may lead to a retry: a table of facts, without processes."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ga.compat.ranks import Ranks, RetryPolicy, waits_in_forward

SYNC = "SyncBatchNorm layers let ranks wait for each other in forward passes"
APART = "Strategy exchanges gradients in a way of its own"
SHARDS = "Strategy shards the model over ranks"

ALONE = Ranks()
DDP = Ranks(distributed=True)
SYNCED = Ranks(distributed=True, obstacle=SYNC, wait_in_step=True)
OWN = Ranks(distributed=True, obstacle=APART)
SHARDED = Ranks(distributed=True, obstacle=SHARDS, wait_in_step=True, sharded=True)


@pytest.mark.parametrize(
    ("ranks", "wanted", "cut_in_step", "must_average", "policy"),
    [
        (ALONE, True, False, False, RetryPolicy(True)),
        (ALONE, False, False, False, RetryPolicy(False)),
        (ALONE, True, True, False, RetryPolicy(True)),
        (ALONE, False, True, False, RetryPolicy(False)),
        (DDP, True, False, False, RetryPolicy(True, by_hand=True)),
        (DDP, True, True, False, RetryPolicy(True, by_hand=True, undecided=True)),
        (DDP, False, True, False, RetryPolicy(False, by_hand=True, undecided=True)),
        (DDP, False, False, False, RetryPolicy(False)),
        (DDP, False, False, True, RetryPolicy(False, by_hand=True)),
        (SYNCED, True, False, False, RetryPolicy(False, SYNC, lockstep=True)),
        (SYNCED, False, True, False, RetryPolicy(False, lockstep=True, undecided=True)),
        (OWN, True, False, False, RetryPolicy(False, APART)),
        (SHARDED, True, False, False, RetryPolicy(False, SHARDS, lockstep=True)),
        (SHARDED, False, True, False, RetryPolicy(False, lockstep=True, undecided=True)),
    ],
)
def test_what_training_does(ranks, wanted, cut_in_step, must_average, policy):
    """Retries need a rank that can run more passes than the others; without that there is a reason to tell."""
    found = ranks.in_training(wanted=wanted, cut_in_step=cut_in_step, must_average=must_average)
    assert found == policy


@pytest.mark.parametrize(("world_size", "waits"), [(1, False), (2, True)])
def test_synchronized_layers_wait_on_several_ranks_only(world_size: int, waits: bool) -> None:
    module = torch.nn.Sequential(torch.nn.SyncBatchNorm(2))
    trainer = SimpleNamespace(world_size=world_size, lightning_module=module)
    assert (waits_in_forward(trainer) is not None) == waits


@pytest.mark.parametrize("wanted", [False, True])
def test_what_evaluation_does(wanted: bool) -> None:
    """A rank evaluates by itself, unless it holds a part of the model only."""
    assert [ranks.in_evaluation(wanted=wanted).retries for ranks in (ALONE, DDP, SYNCED, OWN)] == [wanted] * 4
    refused = SHARDED.in_evaluation(wanted=wanted)
    assert refused == RetryPolicy(False, SHARDS if wanted else None)
