"""Ranks that are killed and join under torchrun's agents train what an undisturbed run trains."""

import os
import random
import signal

import pytest

from benchmarks import elastic_worker
from benchmarks.elastic import Campaign, undisturbed


@pytest.mark.slow
@pytest.mark.distributed
def test_a_kill_a_join_and_a_notice_leave_the_training_the_same(tmp_path):
    """Of two ranks one is killed in its exchange of gradients; another joins; SIGTERM ends an agent; one is left."""
    expected = undisturbed(tmp_path / "undisturbed", mode="loader", epochs=12)
    campaign = Campaign(tmp_path / "run", {"mode": "loader", "epochs": 12, "pause": 0.2})
    try:
        campaign.start()
        campaign.start()
        assert campaign.wait_for_windows(3)
        campaign.kill(elastic_worker.EXCHANGE, random.Random(0))
        assert campaign.wait_for_windows(3)
        campaign.start()
        assert campaign.wait_for_windows(3)
        last = campaign.latest()[-1]
        os.kill(last["pids"][0], signal.SIGTERM)
        assert campaign.wait(campaign.has_ended, "the rest")
    finally:
        campaign.close()
    assert campaign.kills == {elastic_worker.EXCHANGE: 1}
    difference = campaign.compared(expected)
    assert not campaign.broken
    assert difference <= 1e-12
    lost = campaign.lost()
    assert lost[0] <= 5 + 2
    assert lost[1:] == [0] * len(lost[1:])  # those of the join and of the notice
