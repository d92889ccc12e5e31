"""What a step logs, held back until the whole batch has run, and then logged once.

So a batch that runs in pieces logs what it would have logged whole, and an attempt that fails has
logged nothing: means are averaged over the pieces, and a metric's value is that of the whole batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.batch.merge import weighted_mean


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``log``.

    Attributes:
        fx: The hook that it was called in.
        name: What was logged.
        value: Its value, without a graph.
        settings: All other arguments.
    """

    fx: str
    name: str
    value: Any
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one piece logged, its weight in means, and its samples."""

    weight: float
    samples: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of several entries that become one."""

    entry: Entry
    piece: _Piece


class LogBuffer:
    """The entries of one batch, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._open: list[Entry] = []

    def note(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        """Take the place of the trainer's ``log``."""
        self._open.append(Entry(fx, name, _detached(value), settings))

    def keep(self, weight: float, samples: int = 0) -> None:
        """A piece of so many samples went through; ``weight`` is what it weighs in means."""
        self._pieces.append(_Piece(weight, samples, self._open))
        self._open = []

    def drop(self) -> None:
        """A piece failed: it has logged nothing."""
        self._open = []

    def replay(self, log: Callable[..., None], run: Callable[[Callable[[], None]], None] = lambda log: log()) -> None:
        """Log each entry once, merged over the pieces.

        Args:
            log: Takes entries; one that fails has logged nothing.
            run: Calls what logs one entry.
        """
        groups: dict[tuple[str, str, int], list[_Part]] = {}
        for piece in self._pieces:
            times: dict[tuple[str, str], int] = {}
            for entry in piece.entries:
                time = times[entry.fx, entry.name] = times.get((entry.fx, entry.name), -1) + 1
                groups.setdefault((entry.fx, entry.name, time), []).append(_Part(entry, piece))
        whole = sum(piece.samples for piece in self._pieces)
        for parts in groups.values():
            run(partial(_log, log, parts, whole if len(self._pieces) > 1 else None))


def _log(log: Callable[..., None], parts: Sequence[_Part], whole: int | None) -> None:
    entry = parts[0].entry if whole is None else _merged(parts, whole)
    log(entry.fx, entry.name, entry.value, **entry.settings)


def _merged(parts: Sequence[_Part], whole: int) -> Entry:
    """One entry for the batch.

    Sums are added up, and of extremes the most extreme stays. Means are averaged by the pieces' weights,
    or by ``batch_size`` where that counts something else than samples, such as tokens.
    """
    first, samples = parts[0].entry, [part.piece.samples for part in parts]
    settings, weights = dict(first.settings), [part.piece.weight for part in parts]
    sizes = [size for part in parts if (size := part.entry.settings.get("batch_size")) is not None]
    if len(sizes) == len(parts) and not _is_constant(sizes, samples, whole):
        settings["batch_size"] = sum(sizes)
        weights = weights if sizes == samples else sizes
    if isinstance(first.value, Metric):
        return Entry(first.fx, first.name, first.value, settings)
    values = [torch.as_tensor(part.entry.value) for part in parts]
    reduce_fx = settings.get("reduce_fx")
    reduce = _EXTENSIVE.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    value = _mean(values, weights) if reduce is None else reduce(torch.stack(values))
    return Entry(first.fx, first.name, value, settings)


# What ``reduce_fx`` may be besides a mean (``_Metadata`` of ``logger_connector/result.py``).
_EXTENSIVE: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}


def _is_constant(sizes: Sequence[float], samples: Sequence[int], whole: int) -> bool:
    """Whether ``batch_size`` is a number that the user wrote, and not counted in each piece."""
    if len(set(sizes)) > 1:
        return False
    return len(set(samples)) > 1 or (sizes[0] in (1, whole) and sizes[0] != samples[0])


def _mean(values: list[Tensor], weights: Sequence[float]) -> Tensor:
    """By weight; pieces of no weight are passed over, as their mean is over nothing."""
    values = [value if value.is_floating_point() else value.to(torch.get_default_dtype()) for value in values]
    heavy = [(value, weight) for value, weight in zip(values, weights) if weight]
    return weighted_mean(*zip(*heavy)) if heavy else values[-1]


def _detached(value: Any) -> Any:
    """Without a graph, and without the operations of a subclass: these may be many, and run for each sum."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor)
