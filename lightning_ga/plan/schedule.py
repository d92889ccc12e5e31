"""Turn a number, a mapping from epoch or a callable into a function of the epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from operator import index
from typing import Any

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count

ScheduleLike = int | Mapping[int, int] | Callable[[int], int]
Schedule = Callable[[int], int | None]


def as_schedule(value: ScheduleLike | None, *, name: str) -> Schedule:
    """Turn the user's value into ``epoch -> count``, which is ``None`` for epochs that the value leaves open.

    A mapping holds from its epoch on, as in Lightning's ``GradientAccumulationScheduler``, and is
    copied: later changes of the caller's mapping have no effect.

    Args:
        value: A count of at least one, a mapping ``{epoch: count}``, a callable, or ``None``.
        name: The argument's name, for messages.

    Raises:
        UserError: If a count is below one, or an epoch is not a whole number of at least zero.

    Examples:
        >>> schedule = as_schedule({0: 32, 2: 64}, name="effective_batch_size")
        >>> [schedule(epoch) for epoch in range(4)]
        [32, 32, 64, 64]
    """
    if value is None:
        return _Steps(())
    if isinstance(value, Mapping):
        return _from_mapping(value, name)
    if callable(value):
        require_one_argument(name, value, "epoch", "32")
        return _Checked(name, value)
    return _Steps(((0, require_count(name, value)),))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Counts that hold from their epochs on, in rising order; none before the first."""

    counts: tuple[tuple[int, int], ...]

    def __call__(self, epoch: int) -> int | None:
        begun = [count for start, count in self.counts if start <= epoch]
        return begun[-1] if begun else None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A callable of the user, whose counts are checked at each call."""

    name: str
    schedule: Callable[[int], int]

    def __call__(self, epoch: int) -> int:
        return require_count(f"{self.name}(epoch={epoch})", self.schedule(epoch))


def _from_mapping(value: Mapping[int, int], name: str) -> Schedule:
    if not value:
        raise UserError(f"{name}={{}} is empty: give at least one epoch, for example {{0: 32}}.")
    steps: dict[int, int] = {}
    for key, count in value.items():
        try:
            epoch = int(key) if isinstance(key, str) and key.isdecimal() else index(key)
        except TypeError:
            epoch = -1
        if isinstance(key, bool) or epoch < 0:
            raise UserError(f"{name} has the epoch {key!r}; epochs are whole numbers and start at 0.")
        steps[epoch] = require_count(f"{name}[{epoch}]", count)
    return _Steps(tuple(sorted(steps.items())))


def require_one_argument(name: str, function: Callable[..., Any], what: str, example: str) -> None:
    """Refuse a function that cannot be called with the epoch, or the batch, alone."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # some built-in functions show none
        return
    try:
        parameters.bind(0)
    except TypeError:
        raise UserError(
            f"{name} is a function with the arguments {parameters}, and it is called with the {what} alone: take one, "
            f"as in lambda {what}: {example}."
        ) from None
