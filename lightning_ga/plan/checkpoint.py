"""The state of a run in a checkpoint: plain values, so that it loads with ``weights_only=True``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, get_args

from lightning_ga.errors import UserError
from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.plan.records import Method, ProbeResult, Source, Timing, Trial, read_attribution


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data."""

    seed: int  # of the epochs' orders
    epoch: int
    samples_done: int  # of the epoch, by optimizer steps of all ranks
    batches_before: int  # of the recipe, in earlier epochs, on one rank
    shuffles: bool = False  # whether the run has begun on ranks among which the Trainer shares a shuffled order
    steps_before: int = 0  # optimizer steps of earlier epochs
    samples_before: int = 0  # of earlier epochs, over all ranks
    samples_short: int = 0  # by which ``samples_done`` is more than a stream turned out to hold


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
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "RunState":
        """Return the record that ``to_dict`` was called on; without a probe's record of another version's making."""
        try:
            position, limit = Position(**state["position"]), state.get("limit")
            _require_counts(position.epoch, position.samples_done, position.batches_before, least=0)
            _require_counts(position.steps_before, position.samples_before, least=0)
            _require_counts(1 if limit is None else limit, state.get("oom_events", 0) + 1, abs(position.seed) + 1)
            probe = probe_or_none(state["probe"])
            return cls(position, str(state["hardware"]), probe, limit, state.get("oom_events", 0))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The state of AutoAccumulate in the checkpoint is none that it wrote: {error!r}."
            ) from error


def probe_or_none(record: Any) -> ProbeResult | None:
    """Return what a probe found; ``None`` where that cannot be read: a probe finds it again."""
    try:
        return None if record is None else read_probe(record)
    except (KeyError, TypeError, ValueError):
        return None


def read_probe(record: Mapping[str, Any]) -> ProbeResult:
    """Return the record that ``asdict`` was called on, also after it went through JSON; raise if it is none."""
    result = ProbeResult(
        **{
            **record,
            "trials": tuple(Trial(**trial) for trial in record["trials"]),
            "curve": tuple((samples, size) for samples, size in record.get("curve", ())),
            "timings": tuple(Timing(**timing) for timing in record.get("timings", ())),
            "holders": read_attribution(record.get("holders")),
            "sizes": SizeLimits(**record["sizes"]) if record.get("sizes") else None,
        }
    )
    trials = [number for trial in result.trials for number in (trial.micro_batch_size, trial.peak_bytes)]
    timings = [number for timing in result.timings for number in (timing.micro_batch_size, timing.factor)]
    sizes = () if result.sizes is None else (result.sizes.budget, result.sizes.samples, result.sizes.offset + 1)
    fastest = () if result.fastest is None else (result.fastest, result.limit + 1 - result.fastest)
    _require_counts(result.limit, result.budget_bytes, *timings, *sizes, *fastest)
    _require_counts(result.peak_bytes, result.steps, result.kept_chunks, *trials, *chain(*result.curve), least=0)
    for value, known in ((result.method, get_args(Method)), (result.source, get_args(Source))):
        if value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return result


def _require_counts(*values: Any, least: int = 1) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} is not a whole number of at least {least}")
