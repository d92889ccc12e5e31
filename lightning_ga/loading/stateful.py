"""Loaders that save and restore their position in the data."""

from collections.abc import Iterable, Sequence
from typing import Any


def keeps_place(loader: Any) -> bool:
    """Return whether a loader saves and restores its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def states_of(loaders: Iterable[Any]) -> list[Any]:
    """Return the states of those loaders that have one."""
    return [loader.state_dict() for loader in loaders if keeps_place(loader)]


def load_states(loaders: Iterable[Any], states: Sequence[Any]) -> None:
    """Restore the positions of loaders; refuse another number of them with the error of Lightning."""
    keeping = [loader for loader in loaders if keeps_place(loader)]
    if len(keeping) != len(states):
        raise RuntimeError(
            f"The checkpoint holds the states of {len(states)} data loaders and the training data have {len(keeping)} "
            "that keep a state: give fit() the loaders that the checkpoint was written with."
        )
    for loader, state in zip(keeping, states):
        loader.load_state_dict(state)
