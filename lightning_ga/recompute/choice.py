"""Choose the submodules that are computed again, from what each frees and some trial steps. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, log
from operator import attrgetter

PARTS = (8, 2)  # submodules that would free more than this part of all are split, if their parts free half of that
MOST_TRIALS = 8
NEAR = 1.4  # times as many bytes a second: measured times do not tell less


@dataclass(frozen=True, slots=True)
class Candidate:
    """A submodule that may be computed again.

    Attributes:
        name: As in ``named_modules``; empty for the whole module, which is no candidate itself.
        frees: Bytes that it would not keep for the backward pass, less the arguments that it would have to keep.
        seconds: Time of its forward passes in a step.
        inner: The submodules that it calls, in the order of their first calls.
        refused: Whether it cannot be computed again. Its parts may be.
    """

    name: str
    frees: int
    seconds: float
    inner: tuple["Candidate", ...] = ()
    refused: bool = False

    def chosen(self, most: float) -> dict[str, "Candidate"]:
        """Return the submodules to choose from, as they are called; none lies inside another.

        One that would free more than ``most`` bytes is split if its parts free half of that.
        """
        is_split = self.frees > most and sum(map(attrgetter("frees"), self.inner)) > self.frees / 2
        parts: dict[str, Candidate] = {}
        if not self.name or self.refused or is_split:
            for part in self.inner:
                parts.update(part.chosen(most))
        elif self.frees > 0:
            parts[self.name] = self
        return parts


@dataclass(frozen=True, slots=True)
class ChosenSet:
    """Submodules that are computed again so that a step fits.

    Attributes:
        names: As they are called; empty if no set fits.
        share: Their part of the forward pass, which runs once more.
        frees: Bytes that they would not keep, summed.
        peak_bytes: The peak of their step; ``None`` if no set fits.
        trials: The peaks of the sets that were tried, in order; ``None`` for those that do not fit.
    """

    names: tuple[str, ...]
    share: float
    frees: int
    peak_bytes: int | None
    trials: Mapping[tuple[str, ...], int | None]


def choose(
    root: Candidate, run: Callable[[tuple[str, ...]], int | None], budget: int, most_trials: int = MOST_TRIALS
) -> ChosenSet:
    """Return the submodules that make a step fit a budget, and lose little time.

    All are tried first: if they do not fit, nothing does. Those that free most bytes a second come first, near equals
    as they are called; how many are needed is predicted from the peak of the last trial that fitted, and halved after
    a miss. At the end those are left out that turn out not to be needed, from the last call on.

    Args:
        root: The whole module, as ``survey`` returns it.
        run: Runs an isolated step with these submodules computed again; its peak, ``None`` if it does not fit.
        budget: Bytes of the whole step.
        most_trials: Steps to try at most.
    """
    ran: dict[tuple[str, ...], int | None] = {}

    def fits(names: Sequence[str]) -> bool:
        tried = tuple(names)
        if tried and tried not in ran and len(ran) < most_trials:
            ran[tried] = run(tried)
        return ran.get(tried) is not None

    candidates: dict[str, Candidate] = {}
    for parts in PARTS:
        found = root.chosen(root.frees / parts)
        if not candidates and fits([*found]):
            candidates = found
    ranked = _ranked(candidates)
    sums = [0, *accumulate(candidates[name].frees for name in ranked)]

    def first(count: int) -> tuple[str, ...]:
        """Return so many of the best, as they are called."""
        return tuple(name for name in candidates if name in ranked[:count])

    low = 0
    high = len(ranked)
    while high - low > 1:
        spare = budget - (ran[first(high)] or 0)
        middle = bisect_left(sums, sums[high] - spare, hi=high - 1)
        if middle <= low:  # so few did not fit
            middle = (low + high) // 2
        if fits(first(middle)):
            high = middle
        else:
            low = middle
    names = first(high)
    count = 1
    while 0 < count < len(names):  # those that are called last run again near the peak, and free little there
        if fits(names[:-count]):
            names = names[:-count]
            count *= 2
        else:
            count //= 4
    share = sum(candidates[name].seconds for name in names) / max(root.seconds, 1e-9)
    frees = sum(candidates[name].frees for name in names)
    return ChosenSet(names, share, frees, ran.get(names), ran)


def _ranked(candidates: Mapping[str, Candidate]) -> list[str]:
    """Return those first that free most bytes a second; of near equals, which times cannot tell apart, the first call.

    Those between the best and ``NEAR`` times less come first, then those down to ``NEAR`` times less again, and so on.
    The last calls run again near the peak, and free little there.
    """
    worth = {name: each.frees / max(each.seconds, 1e-9) for name, each in candidates.items()}
    best = max(worth.values(), default=0.0)

    def steps_below_best(name: str) -> int:
        return floor(log(best / worth[name], NEAR))

    return sorted(worth, key=steps_below_best)
