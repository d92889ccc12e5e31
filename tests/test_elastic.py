"""Training on whatever ranks are alive: what a script needs from here."""

import pytest

from lightning_ga import UserError
from lightning_ga.elastic import trainer_arguments


def test_a_trainer_gets_the_ranks_of_torchrun():
    """One device for each process of an agent, one node for each agent."""
    for world_size, local, devices, nodes, strategy in ((1, 1, 1, 1, "auto"), (4, 1, 1, 4, "ddp"), (6, 2, 2, 3, "ddp")):
        ranks = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local)}
        found = trainer_arguments({"TORCHELASTIC_RUN_ID": "x", **ranks})
        assert found == {"devices": devices, "num_nodes": nodes, "strategy": strategy}
    with pytest.warns(UserWarning, match="torchrun has not started this process: training runs on one rank"):
        assert trainer_arguments({"WORLD_SIZE": "4"})["devices"] == 1


def test_agents_that_have_started_different_numbers_of_processes_are_refused_on_every_rank():
    """One, one and two processes, or one and two; without ``GROUP_WORLD_SIZE`` where the numbers alone show it."""
    for agents, world_size, local in (("3", "4", "1"), ("3", "4", "2"), ("2", "3", "1"), (None, "3", "2")):
        ranks = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local}
        if agents is not None:
            ranks["GROUP_WORLD_SIZE"] = agents
        with pytest.raises(UserError, match=rf"WORLD_SIZE={world_size} is not .* LOCAL_WORLD_SIZE={local}: start"):
            trainer_arguments(ranks)
