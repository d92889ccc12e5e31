"""Hold back what a step logs until its batch has run in pieces, and log it once: as values of the whole batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.batch.merge import mean_of_numbers


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``log``."""

    fx: str  # the hook that it was called in
    name: str
    value: Any  # without a graph
    settings: dict[str, Any]  # all other arguments


@dataclass(frozen=True, slots=True)
class _Part:
    """An entry of one piece, and what the piece weighs in means and holds in samples."""

    entry: Entry
    weight: float
    samples: int


class LogBuffer:
    """The entries of one batch, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[list[_Part]] = []
        self._open: list[Entry] = []
        self._samples = 0

    def note(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        """Note an entry of the piece that runs, in place of the trainer's ``log``."""
        self._open.append(Entry(fx, name, _detached(value), settings))

    def keep(self, weight: float, samples: int = 0) -> None:
        """Keep the entries of a piece that has run."""
        self._pieces.append([_Part(entry, weight, samples) for entry in self._open])
        self._samples += samples
        self._open = []

    def replay(self, log: Callable[..., None], run: Callable[[Callable[[], None]], None] = lambda log: log()) -> None:
        """Log each entry once, merged over the pieces: ``run`` calls what logs one entry."""
        whole = self._samples if len(self._pieces) > 1 else None
        groups: dict[tuple[str, str, int], list[_Part]] = {}  # the first of a name in each piece, the second, …
        for piece in self._pieces:
            times: Counter[tuple[str, str]] = Counter()
            for part in piece:
                name = part.entry.fx, part.entry.name
                times[name] += 1
                groups.setdefault((*name, times[name]), []).append(part)
        for parts in groups.values():
            run(partial(_log, log, parts, whole))


def _log(log: Callable[..., None], parts: Sequence[_Part], whole: int | None) -> None:
    entry = parts[0].entry if whole is None else _merged(parts, whole)
    log(entry.fx, entry.name, entry.value, **entry.settings)


def _merged(parts: Sequence[_Part], whole: int) -> Entry:
    """Merge entries into one for the batch.

    Sums are added up, and extremes are reduced likewise. Means are averaged by the pieces' weights, or by
    ``batch_size`` where that counts something else than samples, such as tokens.
    """
    first, samples = parts[0].entry, [part.samples for part in parts]
    settings, weights = dict(first.settings), [part.weight for part in parts]
    sizes = [size for part in parts if (size := part.entry.settings.get("batch_size")) is not None]
    if len(sizes) == len(parts) and not _is_constant(sizes, samples, weights, whole):
        settings["batch_size"] = sum(sizes)
        weights = weights if sizes == samples else sizes
    if isinstance(first.value, Metric):
        return Entry(first.fx, first.name, first.value, settings)
    values = [torch.as_tensor(part.entry.value) for part in parts]
    reduce_fx = settings.get("reduce_fx")
    reduce = _EXTENSIVE.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    value = mean_of_numbers(values, weights) if reduce is None else reduce(torch.stack(values))
    return Entry(first.fx, first.name, value, settings)


# What ``reduce_fx`` may be besides a mean (``_Metadata`` of ``logger_connector/result.py``).
_EXTENSIVE: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}


def _is_constant(sizes: Sequence[float], samples: Sequence[int], weights: Sequence[float], whole: int) -> bool:
    """Return whether ``batch_size`` is a number that the user wrote, rather than counted in each piece."""
    if len(set(sizes)) > 1:
        return False
    if len(set(samples)) > 1:
        return len(set(weights)) > 1  # what ``normalize`` counts may be as much in pieces of other sizes
    return sizes[0] in (1, whole) and sizes[0] != samples[0]


def _detached(value: Any) -> Any:
    """Return a value without a graph, and as a plain tensor: operations of a subclass may be slow."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)
