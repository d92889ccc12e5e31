"""The same training on whatever ranks are alive: under ``torchrun``, SLURM's requeue, and on spot instances.

``torchrun`` starts the processes again if a machine goes or comes. What a script then needs is here: the arguments of
its Trainer, the newest whole checkpoint, and checkpoints every few windows that do not stop training for long.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from lightning_ga.checkpoint_every import CheckpointEvery as CheckpointEvery
from lightning_ga.checkpoints import newest_checkpoint as newest_checkpoint
from lightning_ga.errors import UserError

__all__ = ["CheckpointEvery", "newest_checkpoint", "trainer_arguments"]


def trainer_arguments(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return ``devices``, ``num_nodes`` and ``strategy`` of a Trainer for the ranks that ``torchrun`` has started.

    Outside of ``torchrun`` they are those of one rank, and a warning says so.

    Raises:
        UserError: If the agents have started different numbers of processes.

    Examples:
        >>> trainer_arguments({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"})
        {'devices': 2, 'num_nodes': 3, 'strategy': 'ddp'}
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        warnings.warn("torchrun has not started this process: training runs on one rank.", stacklevel=2)
        return {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    world_size = int(environment["WORLD_SIZE"])
    devices = int(environment["LOCAL_WORLD_SIZE"])
    agents = int(environment.get("GROUP_WORLD_SIZE", world_size // devices))
    if agents * devices != world_size:
        raise UserError(
            f"WORLD_SIZE={world_size} is not GROUP_WORLD_SIZE={agents} times LOCAL_WORLD_SIZE={devices}: start all "
            "agents with the same --nproc-per-node."
        )
    return {"devices": devices, "num_nodes": agents, "strategy": "ddp" if world_size > 1 else "auto"}
