"""What the user asked for, checked before anything runs: the arguments of ``AutoAccumulate``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.schedule import Schedule, ScheduleLike, as_schedule, largest

Budget = int | float | str | None
Normalize = Literal["samples"] | Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments, as functions of the epoch where they may change over training.

    Attributes:
        effective: Effective batch size by epoch; ``None`` keeps the recipe's.
        factor: Accumulation factor by epoch; ``None`` where the effective batch decides.
        micro_batch: A micro-batch that the user fixed; ``None`` to probe for it.
        most: Never more than this.
    """

    effective: Schedule
    factor: Schedule
    micro_batch: int | None
    most: int | None

    def effective_batch(self, epoch: int, micro_batch: int, world_size: int) -> int | None:
        """Effective batch size of an epoch; ``None`` keeps the recipe's windows."""
        factor = self.factor(epoch)
        return self.effective(epoch) if factor is None else factor * micro_batch * world_size

    def capped(self, micro_batch: int) -> int:
        """A micro-batch that obeys what the user fixed."""
        wanted = micro_batch if self.micro_batch is None else self.micro_batch
        return wanted if self.most is None else min(wanted, self.most)

    def useful_limit(self, epochs: range, *, recipe: int, total: int | None, world_size: int) -> int:
        """Largest micro-batch that any of these epochs can use, in samples.

        With a fixed factor it is what leaves one full window per epoch; otherwise a rank's share of
        the largest effective batch.
        """
        factor = largest(self.factor, epochs)
        share = -(-max(self.effective(epoch) or recipe for epoch in epochs) // world_size)
        if factor is not None:
            share = recipe if total is None else max(1, total // (factor * world_size))
        elif total is not None:
            share = min(share, max(1, -(-total // world_size)))
        return self.capped(share)


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that say how.

    Attributes:
        budget: ``memory_budget`` as the user wrote it.
        normalize: What micro-batches are weighted by: ``"samples"``, a callable that counts the items
            of a batch, or ``None`` for Lightning's division by the nominal factor.
        batch_norm: What is done about BatchNorm layers: ``"warn"``, ``"rescale"`` or ``"ignore"``.
        verify: Whether exactness is measured.
        objective: What a micro-batch is chosen for: ``"memory"`` or ``"throughput"``.
        cache: Whether limits are remembered between runs.
        on_oom: What happens when memory runs out: ``"split"`` or ``"raise"``.
        micro_batching: Where batches are cut: in the ``"loader"`` or in the ``"step"``.
    """

    budget: Budget = None
    normalize: Normalize = "samples"
    batch_norm: str = "warn"
    verify: bool = True
    objective: str = "memory"
    cache: bool = True
    on_oom: str = "split"
    micro_batching: str = "loader"


def read_request(
    effective_batch_size: ScheduleLike | None,
    accumulate: ScheduleLike | None,
    micro_batch_size: int | Literal["auto"],
    max_micro_batch_size: int | None,
) -> Request:
    """Check the arguments that say how much, and turn them into a ``Request``.

    Raises:
        UserError: If two of them contradict each other or one is not a count of at least one.
    """
    if effective_batch_size is not None and accumulate is not None:
        raise UserError(
            f"{effective_batch_size=} and {accumulate=} exclude each other: the first lets the factor follow, the "
            "second fixes it. Give one."
        )
    return Request(
        effective=as_schedule(effective_batch_size, name="effective_batch_size"),
        factor=_factors(accumulate),
        micro_batch=None if micro_batch_size == "auto" else _micro_batch("micro_batch_size", micro_batch_size),
        most=None if max_micro_batch_size is None else require_count("max_micro_batch_size", max_micro_batch_size),
    )


def refuse_unfinished(**given: tuple[Any, Any, str]) -> None:
    """Refuse arguments that this version only knows by name, rather than doing nothing with them.

    Args:
        given: For each argument its value, its default and what to do instead.

    Raises:
        UserError: If a value is not the default.
    """
    for name, (value, default, instead) in given.items():
        if value != default:
            raise UserError(f"{name}={value!r} is not available in this version, only {default!r}: {instead}.")


def require_choice(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        UserError: Naming the argument, the value and the choices.
    """
    for name, (value, choices) in given.items():
        if value not in choices:
            raise UserError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _micro_batch(name: str, value: Any) -> int:
    if isinstance(value, str):
        raise UserError(f'{name}={value!r} must be a whole number of at least 1, or "auto".')
    return require_count(name, value)


@dataclass(frozen=True, slots=True)
class _FromOne:
    """Before the first epoch of a mapping the factor is 1, as in Lightning's scheduler."""

    schedule: Schedule

    def __call__(self, epoch: int) -> int:
        return self.schedule(epoch) or 1


def _factors(accumulate: ScheduleLike | None) -> Schedule:
    schedule = as_schedule(accumulate, name="accumulate")
    return schedule if accumulate is None else _FromOne(schedule)
