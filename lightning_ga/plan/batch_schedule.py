"""Turn a number, a mapping from epoch, a callable or a schedule by window into a function of training's place.

Pure. Schedules by window give a count for every optimizer step (``by_step``, ``linear``, ``geometric``) or for the
samples seen so far (``by_samples``), both from the start of training on.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from inspect import signature
from math import ceil, floor
from numbers import Real
from operator import index
from typing import Any, Literal

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ceil_div, require_count

Unit = Literal["epoch", "step", "samples"]


@dataclass(frozen=True, slots=True, repr=False)
class PiecewiseSchedule:
    """Counts that are each valid from an epoch, an optimizer step, or a number of samples on.

    Called with an epoch, it returns the count of the epoch, ``None`` before the first. If windows change within epochs,
    it returns the largest count, for which a plan in advance has to be made.
    """

    name: str  # as the user would write it
    unit: Unit
    starts: tuple[int, ...]  # rising; from 0 on if the unit is not the epoch
    counts: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name

    def __call__(self, epoch: int) -> int | None:
        """Return the count of an epoch."""
        if self.by_window:
            return self.largest
        level = bisect_right(self.starts, epoch)
        return self.counts[level - 1] if level else None

    @property
    def by_window(self) -> bool:
        """Whether windows may change within an epoch."""
        return self.unit != "epoch"

    @property
    def largest(self) -> int:
        """The largest count that there may be."""
        return max(self.counts)

    @property
    def is_constant(self) -> bool:
        """Whether there is one count."""
        return len(self.counts) == 1

    def at(self, step: int, samples: int) -> int:
        """Return the count of the window that begins after so many steps and samples."""
        return self.counts[bisect_right(self.starts, self._place(step, samples)) - 1]

    def is_settled(self, step: int, samples: int) -> bool:
        """Return whether the count stays what it is after so many steps and samples."""
        return self.starts[-1] <= self._place(step, samples)

    def later(self, step: int, samples: int, *, times: int) -> "PiecewiseSchedule":
        """Return this schedule as it goes on after so many steps and samples, each count so many times as large."""
        before = self._place(step, samples)
        starts = tuple(start - before for start in self.starts)
        return PiecewiseSchedule(self.name, self.unit, starts, tuple(times * count for count in self.counts))

    def at_most(self, most: int) -> "PiecewiseSchedule":
        """Return this schedule with no count above ``most``."""
        return replace(self, counts=tuple(min(count, most) for count in self.counts))

    def _place(self, step: int, samples: int) -> int:
        return step if self.unit == "step" else samples


NOT_GIVEN = PiecewiseSchedule("None", "epoch", (), ())


def constant(batch: int) -> PiecewiseSchedule:
    """Return the schedule of windows of one size."""
    return PiecewiseSchedule(str(batch), "step", (0,), (batch,))


ScheduleLike = int | Mapping[int, int] | Callable[[int], int] | PiecewiseSchedule
Schedule = Callable[[int], int | None]


def by_step(counts: Mapping[int, int]) -> PiecewiseSchedule:
    """Use each count from its optimizer step on: ``{step: count}``, beginning with step 0.

    Examples:
        >>> schedule = by_step({0: 32, 100: 64})
        >>> schedule.at(99, 0), schedule.at(100, 0)
        (32, 64)
    """
    return _by("step", counts)


def by_samples(counts: Mapping[int, int]) -> PiecewiseSchedule:
    """Use each count from the first window after so many samples of all ranks: ``{samples: count}``, beginning with 0.

    Examples:
        >>> by_samples({0: 32, 50_000: 64}).at(0, 50_016)
        64
    """
    return _by("samples", counts)


def linear(start: int, end: int, *, steps: int) -> PiecewiseSchedule:
    """Go from ``start`` to ``end`` in ``steps`` equal parts, one value an optimizer step.

    Examples:
        >>> schedule = linear(10, 30, steps=2)
        >>> [schedule.at(step, 0) for step in range(4)]
        [10, 20, 30, 30]
    """
    start, end, steps = _ramp("linear", start=start, end=end, steps=steps)
    counts = {0: start}
    for level in range(1, abs(end - start) + 1):
        halfway = Fraction(steps * (2 * level - 1), 2 * abs(end - start))  # between this count and the one before
        if end > start:
            counts[ceil(halfway)] = start + level
        else:
            counts[floor(halfway) + 1] = start - level
    return _piecewise(f"linear({start}, {end}, {steps=})", "step", counts)


def geometric(start: int, end: int, *, steps: int, factor: int = 2) -> PiecewiseSchedule:
    """Multiply by ``factor`` at equal distances, from ``start`` to ``end`` after ``steps`` optimizer steps.

    A smaller ``end`` divides; the last change may be smaller than the factor.

    Examples:
        >>> geometric(32, 256, steps=300).starts, geometric(32, 256, steps=300).counts
        ((0, 100, 200, 300), (32, 64, 128, 256))
    """
    start, end, steps = _ramp("geometric", start=start, end=end, steps=steps)
    if require_count("factor", factor) == 1:
        raise UserError("geometric(factor=1) never changes: use a factor of 2 or more.")
    counts = [start]
    while counts[-1] != end:
        power = factor ** len(counts)
        if end > start:
            counts.append(min(start * power, end))
        else:
            counts.append(max(start // power, end))
    levels = max(1, len(counts) - 1)
    by_start = {ceil_div(level * steps, levels): count for level, count in enumerate(counts)}  # of several, the last
    return _piecewise(f"geometric({start}, {end}, {steps=}, {factor=})", "step", by_start)


def from_lr_decay(batch: int, *, milestones: Iterable[int], gamma: float = 0.1) -> PiecewiseSchedule:
    """Grow the batch at the epochs at which a recipe would lower its learning rate (Smith et al., arXiv 1711.00489).

    When ``MultiStepLR(milestones, gamma)`` would multiply the rate by ``gamma``, the batch is divided by it. Leave that
    scheduler out. The rule is valid up to about a tenth of the data set.

    Examples:
        >>> schedule = from_lr_decay(64, milestones=[4, 7], gamma=0.2)
        >>> [schedule(epoch) for epoch in (3, 4, 7)]
        [64, 320, 1600]
    """
    if not isinstance(gamma, Real) or not 0 < gamma < 1:
        raise UserError(f"from_lr_decay({gamma=}) must be between 0 and 1: what the recipe multiplies its rate by.")
    if not isinstance(milestones, Iterable):
        raise UserError(f"from_lr_decay({milestones=}) must be a list of epochs.")
    milestones = sorted(require_count("milestones", epoch) for epoch in milestones)
    batch = require_count("batch", batch)
    counts = tuple(round(batch / gamma**drops) for drops in range(len(milestones) + 1))
    name = f"from_lr_decay({batch}, {milestones=}, {gamma=})"
    return PiecewiseSchedule(name, "epoch", (0, *milestones), counts)


def as_schedule(value: ScheduleLike | None, *, name: str) -> Schedule:
    """Turn the user's value into ``epoch -> count``, which is ``None`` for epochs that the value leaves open.

    An entry of a mapping is valid from its epoch on, as in Lightning's ``GradientAccumulationScheduler``. Messages call
    the value by its ``name``.

    Raises:
        UserError: If a count is below one, or an epoch is not a whole number of at least zero.

    Examples:
        >>> schedule = as_schedule({0: 32, 2: 64}, name="effective_batch_size")
        >>> [schedule(epoch) for epoch in range(4)]
        [32, 32, 64, 64]
    """
    if value is None:
        return NOT_GIVEN
    if isinstance(value, PiecewiseSchedule):
        return value
    if isinstance(value, Mapping):
        return _piecewise(name, "epoch", _counts(name, value, "epoch"))
    if callable(value):
        require_arguments(name, value, "epoch", "32")
        return partial(_checked, name, value)
    return PiecewiseSchedule(name, "epoch", (0,), (require_count(name, value),))


def _checked(name: str, schedule: Callable[[int], int], epoch: int) -> int:
    return require_count(f"{name}(epoch={epoch})", schedule(epoch))


def _counts(name: str, value: Mapping[int, int], unit: Unit) -> dict[int, int]:
    """Return the entries of a mapping in rising order."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name}({value!r}) needs a mapping, such as {{0: 32, 100: 64}}.")
    if not value:
        raise UserError(f"{name}={{}} is empty: give at least one {unit}, for example {{0: 32}}.")
    counts: dict[int, int] = {}
    for key, count in value.items():
        try:
            start = int(key) if isinstance(key, str) and key.isdecimal() else index(key)
        except TypeError:
            start = -1
        if isinstance(key, bool) or start < 0:
            units = f"{unit.removesuffix('s')}s"
            raise UserError(f"{name} has the {unit} {key!r}; {units} are whole numbers and start at 0.")
        counts[start] = require_count(f"{name}[{start}]", count)
    return dict(sorted(counts.items()))


def _by(unit: Unit, value: Mapping[int, int]) -> PiecewiseSchedule:
    name = f"by_{unit}"
    counts = _counts(name, value, unit)
    if min(counts):
        raise UserError(f"{name} begins at {unit} {min(counts)}: say what is valid before, from 0 on.")
    return _piecewise(f"{name}({counts})", unit, counts)


def _piecewise(name: str, unit: Unit, counts: Mapping[int, int]) -> PiecewiseSchedule:
    """Make a schedule of the counts, by their starts, that differ from the one before."""
    levels: dict[int, int] = {}
    for start, count in counts.items():
        if not levels or count != next(reversed(levels.values())):
            levels[start] = count
    return PiecewiseSchedule(name, unit, tuple(levels), tuple(levels.values()))


def _ramp(name: str, **given: int) -> Iterator[int]:
    return (require_count(f"{name}: {key}", value) for key, value in given.items())


def require_arguments(name: str, function: Callable[..., Any], what: str, example: str) -> None:
    """Refuse a function that cannot be called with ``what``: the epoch, the batch, or several with commas."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # some built-in functions show none
        return
    try:
        parameters.bind(*what.split(", "))
    except TypeError:
        raise UserError(
            f"{name} is a function with the arguments {parameters}, and it is called with the {what} alone: accept it, "
            f"as in lambda {what}: {example}."
        ) from None
