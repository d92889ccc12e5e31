"""Hold back what a step logs until its batch has run in pieces, and log it once: as values of the whole batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.batch.merge import weighted_mean


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``log`` in one piece."""

    fx: str  # the hook that it was called in
    name: str
    value: Any  # without a graph
    settings: dict[str, Any]  # all other arguments
    weight: float = 1.0  # of the piece in means
    samples: int = 0  # of the piece


class LogBuffer:
    """The entries of one batch, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[list[Entry]] = []
        self._open: list[Entry] = []
        self._samples = 0

    def note(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        """Note an entry of the piece that runs, in place of the trainer's ``log``."""
        self._open.append(Entry(fx, name, _detached(value), settings))

    def keep(self, weight: float, samples: int = 0) -> None:
        """Keep the entries of a piece that has run."""
        self._pieces.append([replace(entry, weight=weight, samples=samples) for entry in self._open])
        self._samples += samples
        self._open = []

    def replay(self, log: Callable[..., None], run: Callable[[Callable[[], None]], None] = lambda log: log()) -> None:
        """Log each entry once, merged over the pieces: ``run`` calls what logs one entry."""
        batch_samples = self._samples if len(self._pieces) > 1 else None
        groups: dict[tuple[str, str, int], list[Entry]] = {}  # the first of a name in each piece, the second, …
        for piece in self._pieces:
            times: Counter[tuple[str, str]] = Counter()
            for entry in piece:
                name = entry.fx, entry.name
                times[name] += 1
                groups.setdefault((*name, times[name]), []).append(entry)
        for entries in groups.values():
            run(partial(_log, log, entries, batch_samples))


def _log(log: Callable[..., None], entries: Sequence[Entry], batch_samples: int | None) -> None:
    entry = entries[0] if batch_samples is None else _merged(entries, batch_samples)
    log(entry.fx, entry.name, entry.value, **entry.settings)


def _merged(entries: Sequence[Entry], batch_samples: int) -> Entry:
    """Merge the entries of pieces into one for the batch.

    Sums are added up, and of extremes the extreme is taken. Means are averaged by the pieces' weights, or by
    ``batch_size`` if that counts something else than samples, such as tokens.
    """
    first, samples = entries[0], [entry.samples for entry in entries]
    settings, weights = dict(first.settings), [entry.weight for entry in entries]
    sizes = [size for entry in entries if (size := entry.settings.get("batch_size")) is not None]
    if len(sizes) == len(entries) and not _is_constant(sizes, samples, weights, batch_samples):
        settings["batch_size"] = sum(sizes)
        weights = weights if sizes == samples else sizes
    if isinstance(first.value, Metric):
        return replace(first, settings=settings)
    values = [torch.as_tensor(entry.value) for entry in entries]
    reduce_fx = settings.get("reduce_fx")
    reduce = _EXTENSIVE.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    value = weighted_mean(values, weights) if reduce is None else reduce(torch.stack(values))
    return replace(first, value=value, settings=settings)


# What ``reduce_fx`` may be besides a mean (``_Metadata`` of ``logger_connector/result.py``).
_EXTENSIVE: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}


def _is_constant(sizes: Sequence[float], samples: Sequence[int], weights: Sequence[float], batch: int) -> bool:
    """Return whether ``batch_size`` is a number that the user wrote, rather than counted in each piece."""
    if len(set(sizes)) > 1:
        return False
    if len(set(samples)) > 1:
        return len(set(weights)) > 1  # what ``normalize`` counts may be as much in pieces of other sizes
    return sizes[0] in (1, batch) and sizes[0] != samples[0]


def _detached(value: Any) -> Any:
    """Return a value without a graph, and as a plain tensor: operations of a subclass may be slow."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)
