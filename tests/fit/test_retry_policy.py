"""When an out-of-memory error may lead to a retry: a table of facts, without processes."""

from itertools import product

import pytest

from lightning_ga.fit.retry_policy import RankFacts, RetryPolicy, evaluation_policy, training_policy

ALONE = RankFacts("SingleDeviceStrategy")
DDP = RankFacts("DDPStrategy", distributed=True)
SYNCED = RankFacts("DDPStrategy", distributed=True, waits_in_forward="SyncBatchNorm layers let ranks wait")
OWN = RankFacts("HorovodStrategy", distributed=True, reduces_itself=True)
SHARDED = RankFacts("FSDPStrategy", distributed=True, sharded=True)


@pytest.mark.parametrize(
    ("facts", "wanted", "cut_in_step", "must_average", "policy"),
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
        (SYNCED, True, False, False, RetryPolicy(False, SYNCED.waits_in_forward, lockstep=True)),
        (SYNCED, False, True, False, RetryPolicy(False, lockstep=True, undecided=True)),
        (OWN, True, False, False, RetryPolicy(False, "HorovodStrategy exchanges gradients in a way of its own")),
        (SHARDED, True, False, False, RetryPolicy(False, "FSDPStrategy shards the model over ranks", lockstep=True)),
        (SHARDED, False, True, False, RetryPolicy(False, lockstep=True, undecided=True)),
    ],
)
def test_what_training_does(
    facts: RankFacts, wanted: bool, cut_in_step: bool, must_average: bool, policy: RetryPolicy
) -> None:
    """Retries need a rank that can run more passes than the others; without that there is a reason to tell."""
    found = training_policy(facts, wanted=wanted, cut_in_step=cut_in_step, must_average=must_average)
    assert found == policy


@pytest.mark.parametrize("facts", [ALONE, DDP, SYNCED, OWN, SHARDED], ids=lambda facts: facts.strategy)
def test_no_policy_retries_and_refuses(facts: RankFacts) -> None:
    """Nor averages by hand where ranks wait for each other, nor gives reasons that nobody asked for."""
    for wanted, cut, average in product((False, True), repeat=3):
        policy = training_policy(facts, wanted=wanted, cut_in_step=cut, must_average=average)
        assert not (policy.retries and policy.refusal)
        assert not (policy.by_hand and policy.lockstep)
        assert wanted or policy.refusal is None
        assert wanted or not policy.retries


@pytest.mark.parametrize("wanted", [False, True])
def test_what_evaluation_does(wanted: bool) -> None:
    """A rank evaluates by itself, unless it holds a part of the model only."""
    assert [evaluation_policy(facts, wanted=wanted).retries for facts in (ALONE, DDP, SYNCED, OWN)] == [wanted] * 4
    refused = evaluation_policy(SHARDED, wanted=wanted)
    assert refused == RetryPolicy(False, "FSDPStrategy shards the model over ranks" if wanted else None)
