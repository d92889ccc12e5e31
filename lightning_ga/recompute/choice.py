"""Choose the submodules that are computed again, from what each frees and some trial steps. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

PARTS = (8, 2)  # submodules that would free more than this part of all are split, if their parts free half of that
MOST_TRIALS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A submodule that may be computed again.

    Attributes:
        name: As in ``named_modules``; empty for the whole module, which is no candidate itself.
        frees: Bytes that it would not keep for the backward pass, less the arguments that it would have to keep.
        seconds: Time of its forward passes in a step.
        inner: The submodules that it calls, in the order of their first calls.
        refused: Why it cannot be computed again; empty if it can. Its parts may be.
    """

    name: str
    frees: int
    seconds: float
    inner: tuple["Candidate", ...] = ()
    refused: str = ""

    def all(self) -> Iterator["Candidate"]:
        """Yield it, and all submodules inside it."""
        yield self
        for each in self.inner:
            yield from each.all()

    def chosen(self, most: float) -> dict[str, "Candidate"]:
        """Return the submodules to choose from, as they are called; none lies inside another.

        One that would free more than ``most`` bytes is split if its parts free half of that.
        """
        parts = {name: part for each in self.inner for name, part in each.chosen(most).items()}
        is_split = self.frees > most and sum(part.frees for part in parts.values()) > self.frees / 2
        if not self.name or self.refused or is_split:
            return parts
        return {self.name: self} if self.frees > 0 else {}

    def refusing(self, reasons: Mapping[str, str]) -> "Candidate":
        """Return a copy in which submodules are refused for the given reasons."""
        inner = tuple(each.refusing(reasons) for each in self.inner)
        return replace(self, inner=inner, refused=self.refused or reasons.get(self.name, ""))


@dataclass(frozen=True, slots=True)
class SetTrial:
    """A step that was tried with a set of submodules computed again: whether it fits, and its peak if that is known."""

    fits: bool
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChosenSet:
    """Submodules that are computed again so that a step fits.

    Attributes:
        names: As they are called; empty if no set fits.
        fits: Whether a step with them fits.
        share: Their part of the forward pass, which runs once more.
        peak_bytes: The peak of their step; if no set fits, the lowest that was seen. ``None`` if no peak was seen.
        trials: Steps that were tried, in order.
    """

    names: tuple[str, ...]
    fits: bool
    share: float
    peak_bytes: int | None
    trials: tuple[tuple[tuple[str, ...], SetTrial], ...]


@dataclass(slots=True)
class _Trials:
    """Trial steps, each set once; the best that fitted."""

    run: Callable[[tuple[str, ...]], SetTrial]
    seconds: Mapping[str, float]
    most: int
    ran: dict[tuple[str, ...], SetTrial] = field(default_factory=dict)

    def fits(self, names: Iterable[str]) -> SetTrial | None:
        """Try a set; ``None`` if it has no member, or if too many were tried."""
        key = tuple(names)
        if key not in self.ran and key and len(self.ran) < self.most:
            self.ran[key] = self.run(key)
        return self.ran.get(key)

    def cost(self, names: Iterable[str]) -> float:
        return sum(self.seconds[name] for name in names)


def choose(
    root: Candidate, run: Callable[[tuple[str, ...]], SetTrial], budget: int, most_trials: int = MOST_TRIALS
) -> ChosenSet:
    """Return the submodules that make a step fit a budget, and lose little time.

    All are tried first: if they do not fit, nothing does. Those that free most bytes a second come first, near equals
    as they are called; how many are needed is predicted from the peak of the last trial that fitted, and halved after
    a miss. At the end those are left out that turn out not to be needed, from the last call on.

    Args:
        root: The whole module, as ``survey`` returns it.
        run: Runs an isolated step with these submodules computed again, and says whether it fits.
        budget: Bytes of the whole step.
        most_trials: Steps to try at most.
    """
    every = {each.name: each for each in root.all()}
    trials = _Trials(run, {name: each.seconds for name, each in every.items()}, most_trials)
    called: tuple[str, ...] = ()
    for parts in PARTS:
        called = tuple(root.chosen(root.frees / parts))
        tried = trials.fits(called)
        if tried is not None and tried.fits:
            break
    else:
        return _result(trials, (), root.seconds)
    ranked = sorted(called, key=lambda name: -_worth(every[name]))
    low = 0
    high = len(ranked)
    last_fitted = True
    peak = tried.peak_bytes
    while high - low > 1:
        middle = (low + high) // 2
        if last_fitted and peak is not None:
            freed = [sum(every[name].frees for name in ranked[k:high]) for k in range(low + 1, high)]
            middle = next((low + 1 + k for k, size in enumerate(freed) if size <= budget - peak), high - 1)
        tried = trials.fits(_in_order(called, ranked[:middle]))
        if tried is None:
            break
        last_fitted = tried.fits
        if tried.fits:
            high = middle
            peak = tried.peak_bytes
        else:
            low = middle
    names = _in_order(called, ranked[:high])
    count = 1
    while 0 < count < len(names):  # those that are called last run again near the peak, and free little there
        tried = trials.fits(names[:-count])
        if tried is None:
            break
        if tried.fits:
            names = names[:-count]
            count *= 2
        else:
            count //= 4
    return _result(trials, names, root.seconds)


def _worth(candidate: Candidate) -> int:
    """Return the bytes that a second frees, as a power of two: measured times within a factor of two are equal."""
    return int(candidate.frees / max(candidate.seconds, 1e-9)).bit_length()


def _in_order(called: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    wanted = set(names)
    return tuple(name for name in called if name in wanted)


def _result(trials: _Trials, names: tuple[str, ...], seconds: float) -> ChosenSet:
    peaks = [each.peak_bytes for each in trials.ran.values() if each.peak_bytes is not None]
    peak = trials.ran[names].peak_bytes if names else min(peaks, default=None)
    share = trials.cost(names) / seconds if seconds else 0.0
    return ChosenSet(names, bool(names), share, peak, tuple(trials.ran.items()))
