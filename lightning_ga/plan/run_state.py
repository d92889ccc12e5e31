"""The state of a run in a checkpoint: plain values, so that it loads with ``weights_only=True``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from lightning_ga.errors import UserError
from lightning_ga.plan.records import ProbeResult, probe_or_none


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data."""

    seed: int  # of the epochs' orders
    epoch: int
    samples_done: int = 0  # of the epoch, by optimizer steps of all ranks
    batches_done: int = 0  # of the epoch and of the recipe, on each rank: those that ended with these samples
    windows_done: int = 0  # in which these samples were
    samples_before: int = 0  # of earlier epochs, over all ranks
    batches_before: int = 0  # of earlier epochs
    steps_before: int = 0  # optimizer steps of earlier epochs
    shuffles: bool = False  # whether the run has begun on ranks among which the Trainer shares a shuffled order

    @property
    def samples_seen(self) -> int:
        """The samples that training has seen from its start on, over all ranks."""
        return self.samples_before + self.samples_done

    def at_start_of(self, epoch: int, steps: int) -> "Position":
        """Return the start of another epoch, or of the same one again, after so many optimizer steps."""
        return replace(
            self,
            epoch=epoch,
            samples_done=0,
            batches_done=0,
            windows_done=0,
            samples_before=self.samples_seen,
            batches_before=self.batches_before + self.batches_done,
            steps_before=steps,
        )

    def after_window(self, *, samples: int, batches: int) -> "Position":
        """Return the position once a window is done, and with it so many samples and batches of the epoch."""
        return Position(  # ``replace`` takes several times as long, in every window
            self.seed,
            self.epoch,
            samples,
            batches,
            self.windows_done + 1,
            self.samples_before,
            self.batches_before,
            self.steps_before,
            self.shuffles,
        )


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in a checkpoint."""

    position: Position
    hardware: str  # that the limit was found on; on any other it is searched for again
    probe: ProbeResult | None
    limit: int | None = None  # most samples of a pass since memory ran out
    oom_events: int = 0  # out-of-memory errors that were survived
    order: str | None = None  # of the epoch's samples, if its sampler would not give it again (``loading/orders.py``)
    in_step: bool = False  # whether the step has cut batches: else the loop has counted micro-batches

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dictionaries only."""
        return {"version": version("lightning_ga"), **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "RunState":
        """Return the record that ``to_dict`` was called on; without the probe of another version of this package."""
        try:
            probe = None
            if state.get("version") == version("lightning_ga"):
                probe = probe_or_none(state["probe"])
            return cls(
                position=Position(**state["position"]),
                hardware=state["hardware"],
                probe=probe,
                limit=state.get("limit"),
                oom_events=state.get("oom_events", 0),
                order=state.get("order"),
                in_step=state.get("in_step", False),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"The checkpoint's state of AutoAccumulate cannot be read: {error!r}.") from error
