"""The state of a run in a checkpoint: plain values, so that it loads with ``weights_only=True``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_ga.errors import UserError
from lightning_ga.plan.records import ProbeResult, probe_or_none, require_counts


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data."""

    seed: int  # of the epochs' orders
    epoch: int
    samples_done: int = 0  # of the epoch, by optimizer steps of all ranks
    windows_done: int = 0  # in which these samples were
    windows_before: int = 0  # of earlier epochs
    steps_before: int = 0  # optimizer steps of earlier epochs
    samples_before: int = 0  # of earlier epochs, over all ranks
    shuffles: bool = False  # whether the run has begun on ranks among which the Trainer shares a shuffled order


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in a checkpoint."""

    position: Position
    hardware: str  # that the limit was found on; on any other it is searched for again
    probe: ProbeResult | None
    limit: int | None = None  # most samples of a pass since memory ran out
    oom_events: int = 0  # out-of-memory errors that were survived

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dictionaries only."""
        return {"version": 2, **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "RunState":
        """Return the record that ``to_dict`` was called on; without a probe's record of another version's making."""
        try:
            position, limit, events = Position(**state["position"]), state.get("limit"), state.get("oom_events", 0)
            counted = asdict(position)
            del counted["seed"], counted["shuffles"]
            require_counts(*counted.values(), events, least=0)
            require_counts(1 if limit is None else limit, abs(position.seed) + 1)
            return cls(position, str(state["hardware"]), probe_or_none(state["probe"]), limit, events)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"The checkpoint's state of AutoAccumulate cannot be read: {error!r}.") from error
