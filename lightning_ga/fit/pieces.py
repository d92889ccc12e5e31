"""Merge what the pieces of a batch log and return, as if the whole batch had run at once.

Torchmetrics accumulate by themselves: each sees the pieces as batches.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_ga.batch.pytree import open_container, rebuild, same_values
from lightning_ga.compat.closures import logging_redirected, plain
from lightning_ga.loading.trials import BatchCutter

# By the name of ``reduce_fx``, a function or a text (``_Metadata`` in Lightning's ``result.py``); else a mean.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass(slots=True)
class _Piece:
    samples: int
    weight: float  # in means
    entries: list[tuple[str, str, Any, dict[str, Any]]] = field(default_factory=list)  # what it has logged
    output: Any = None


class Pieces:
    """Keeps what the pieces of one batch log and return until all have run."""

    def __init__(self, results: Any) -> None:
        self._results = results  # of the loop that runs; ``None`` in prediction
        self._pieces: list[_Piece] = []

    @contextmanager
    def piece(self, *, samples: int, weight: float) -> Iterator[None]:
        """Return a context for the pass over the next piece, whose logged values are kept; an error discards all."""
        if self._pieces:  # free the graph of the piece before
            self._pieces[-1].output = _plain(self._pieces[-1].output)
        piece = _Piece(samples, weight)
        self._pieces.append(piece)
        try:
            with logging_redirected(self._results, lambda *entry: piece.entries.append(entry)):
                yield
        except BaseException:
            self._pieces = []
            raise

    def add(self, output: Any) -> None:
        """Keep what the step has returned for the piece."""
        self._pieces[-1].output = output

    def finish(self) -> Any:
        """Log each value once, as that of the whole batch, and return the output of the whole batch."""
        pieces, self._pieces = self._pieces, []
        _log(self._results, pieces)
        if len(pieces) == 1:
            return pieces[0].output
        return merge(*zip(*[(piece.output, piece.samples, piece.weight) for piece in pieces]))


def cut_in_pieces(cutter: BatchCutter, batch: Any, sizes: Sequence[int]) -> Iterator[tuple[Any, int, bool]]:
    """Yield each piece of a batch when it is asked for, its samples, and whether it is the last; one piece is uncut."""
    start = 0
    for number, size in enumerate(sizes, 1):
        piece = cutter.cut(batch, start, start + size) if len(sizes) > 1 else batch
        yield piece, size, number == len(sizes)
        start += size


def merge(outputs: Sequence[Any], samples: Sequence[int], weights: Sequence[float]) -> Any:
    """Merge what a step returned for the pieces of a batch; graphs and subclasses of tensors are left behind.

    - Tensors, arrays and lists as long as their piece are joined, and lists whose lengths differ.
    - Numbers and tensors of one element are averaged by weight, unless all are equal; a piece of weight 0 is left
      out. Numbers that count the samples of their piece are added up.
    - Containers are merged field by field. ``None`` in some pieces is skipped.
    - Anything else is the value if all are equal, otherwise the list of the values.
    """
    there = [part for part in zip(outputs, samples, weights) if part[0] is not None]
    if not there:
        return None
    values, sizes, shares = map(list, zip(*there))
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _merged_tensors([_plain(value) for value in values], sizes, shares)
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in values):
        if values == sizes and max(sizes) > 1:  # among pieces of one sample, a 1 may be no count
            return sum(sizes)
        numbers = [torch.tensor(float(value), dtype=torch.float64) for value in values]
        return first if _are_equal(values) else mean(numbers, shares).item()
    if any(type(value) is not type(first) for value in values) or isinstance(first, PackedSequence):
        return _same(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values) if _are_by_sample(values, sizes) else _same(values)
    if isinstance(first, list):
        lengths = [len(value) for value in values]
        if lengths == sizes or len(set(lengths)) > 1:
            return rebuild(first, [_plain(item) for value in values for item in value])
    return _same(values) if open_container(first) is None else _merged_fields(values, sizes, shares)


def _merged_fields(values: list[Any], samples: list[int], weights: list[float]) -> Any:
    """Merge containers of one type field by field; keys of a dictionary may be missing in some."""
    children = [dict(open_container(value) or ()) for value in values]
    whole, names = values[0], dict.fromkeys(name for child in children for name in child)
    if isinstance(whole, dict) and len(names) > len(children[0]):
        whole = dict.fromkeys(key for value in values for key in value)
    elif len(names) > len(children[0]):
        return _same(values)
    return rebuild(whole, [merge([child.get(name) for child in children], samples, weights) for name in names])


def _merged_tensors(tensors: list[Tensor], samples: list[int], weights: list[float]) -> Any:
    if any(tensor.is_nested for tensor in tensors):
        return tensors
    if _are_by_sample(tensors, samples):
        return torch.cat(tensors)
    are_numbers = all(tensor.numel() == 1 and tensor.dtype != torch.bool for tensor in tensors)
    if are_numbers and (tensors[0].is_floating_point() or not _are_equal(tensors)):  # a comparison waits for the device
        return mean(tensors, weights)
    return _same(tensors)


def _are_by_sample(values: Sequence[Any], samples: Sequence[int]) -> bool:
    """Return whether the first axis is that of the piece's samples, so that tensors or arrays can be joined."""
    shapes = [tuple(value.shape) for value in values]
    leads = all(shape and shape[0] == size for shape, size in zip(shapes, samples))
    return leads and len({shape[1:] for shape in shapes}) == 1


def _are_equal(values: Sequence[Any]) -> bool:
    return all(same_values(values[0], value) for value in values[1:])


def _same(values: list[Any]) -> Any:
    return _plain(values[0]) if _are_equal(values) else [_plain(value) for value in values]


def _plain(node: Any) -> Any:
    children = open_container(node)
    return plain(node) if children is None else rebuild(node, [_plain(child) for _, child in children])


def _log(results: Any, pieces: list[_Piece]) -> None:
    """Log each value once: the n-th of a name in every piece, merged into one."""
    groups: dict[tuple[Any, ...], list[tuple[Any, dict[str, Any], int, float]]] = {}
    for piece in pieces:
        times: Counter[tuple[str, str]] = Counter()
        for fx, name, value, settings in piece.entries:
            times[fx, name] += 1
            groups.setdefault((fx, name, times[fx, name]), []).append((value, settings, piece.samples, piece.weight))
    for (fx, name, _), group in groups.items():
        value, settings = group[0][:2] if len(pieces) == 1 else _merged_entry(*zip(*group))
        results.log(fx, name, value, **settings)


def _merged_entry(
    values: Sequence[Any], all_settings: Sequence[dict[str, Any]], samples: Sequence[int], weights: Sequence[float]
) -> tuple[Any, dict[str, Any]]:
    """Merge what was logged in all pieces: add up sums, average means by weight or by a counted ``batch_size``."""
    settings, sizes = {**all_settings[0]}, [each.get("batch_size") for each in all_settings]
    if None not in sizes and _are_counts(sizes, samples):
        settings["batch_size"] = sum(sizes)
        weights = weights if sizes == [*samples] else [size or 0 for size in sizes]
    if not all(isinstance(value, Tensor) for value in values):  # a metric has seen all pieces
        return values[0], settings
    kind = settings.get("reduce_fx", "mean")
    reduce = _REDUCTIONS.get(kind.lower() if isinstance(kind, str) else kind.__name__)
    return (mean(values, weights) if reduce is None else reduce(torch.stack([*values]))), settings


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average tensors of one element in at least single precision; leave out those of weight 0, means over nothing."""
    dtype = values[0].dtype if values[0].is_floating_point() or values[0].is_complex() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    pairs = [pair for pair in zip(values, weights) if pair[1]] or [(values[-1], 1.0)]
    if len({weight for _, weight in pairs}) == 1:  # fewer operations
        return torch.stack([value for value, _ in pairs]).to(wide).mean(0).to(dtype)
    total = torch.stack([value.to(wide) * weight for value, weight in pairs]).sum(0)
    return (total / sum(weight for _, weight in pairs)).to(dtype)


def _are_counts(sizes: Sequence[Any], samples: Sequence[int]) -> bool:
    """Return whether each ``batch_size`` was counted in its piece, and is not a constant such as the loader's."""
    if len(set(sizes)) > 1 or sizes == [*samples]:
        return True
    return len(set(samples)) == 1 and sizes[0] % samples[0] == 0 and sizes[0] != sum(samples)  # tokens, as many in each
