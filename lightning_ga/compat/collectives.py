"""Count the collectives of this process: communication in the user's own code shows in the number."""

from typing import Any

import torch.distributed as dist


def collectives_run() -> int:
    """Return how many collectives this rank has begun in all process groups.

    Process groups number their collectives, in Python as in C++ (``c10d/Backend.hpp``, ``getSequenceNumberForGroup``).
    """
    return sum(map(sequence_number, dist.distributed_c10d._world.pg_map)) if dist.is_available() else 0


def sequence_number(group: Any) -> int:
    """Return how many collectives this rank has begun in a process group."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that keeps none
        return 0
