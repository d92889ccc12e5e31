"""Merge what the pieces of a batch log and return, as if the whole batch had run at once.

Torchmetrics accumulate by themselves: each sees the pieces as batches.

Tested in tests/fit/test_pieces.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_ga.batch.pytree import open_container, rebuild, same_values
from lightning_ga.compat.logged_values import Logged, logging_redirected, mean, merged_entry, plain
from lightning_ga.loading.trial_batches import BatchCutter

_Key = tuple[str, str, int]
"""Of a logged value: its hook, its name, and whether the piece has logged that name for the first, second … time."""

_LOSS = ("['loss']", ".loss")  # paths of a loss in a dictionary and in an object


class Pieces:
    """Keeps what the pieces of one batch log and return until all have run."""

    def __init__(self, results: Any, largest_batch: int = 0) -> None:
        self._results = results  # of the loop that runs; ``None`` if nothing that is logged is kept
        self._largest_batch = largest_batch  # samples of the loader's largest batch, not of the one that is cut
        self._samples: list[int] = []  # of each piece
        self._shares: list[float] = []  # of each piece, in means over the batch
        self._outputs: list[Any] = []  # of each piece whose step has returned
        self._logged: dict[_Key, list[Logged]] = {}

    @contextmanager
    def piece(self, *, samples: int, share: float, units: int = 0, logs_at_once: bool = False) -> Iterator[None]:
        """Return a context for the pass over the next piece, whose logged values are kept.

        With ``logs_at_once``, for the last piece, each value is logged as that piece logs it.
        """
        if self._outputs:  # free the graph of the piece before
            self._outputs[-1] = _plain(self._outputs[-1])
        self._samples.append(samples)
        self._shares.append(share)
        log = getattr(self._results, "log", None)
        times: Counter[tuple[str, str]] = Counter()

        def note(fx: str, name: str, value: Any, settings: dict[str, Any]) -> None:
            times[fx, name] += 1
            key = (fx, name, times[fx, name])
            self._logged.setdefault(key, []).append(Logged(value, settings, samples, share, units))
            if logs_at_once:
                self._log(key, log)

        with logging_redirected(self._results, note):
            yield

    def add(self, output: Any) -> None:
        """Keep what the step has returned for the piece."""
        self._outputs.append(output)

    def finish(self) -> Any:
        """Log each value once, as that of the whole batch, and return the output of the whole batch."""
        for key in [*self._logged]:
            self._log(key, self._results.log)
        if len(self._outputs) == 1:
            return self._outputs[0]
        return merge(self._outputs, self._samples, self._shares)

    def _log(self, key: _Key, log: Any) -> None:
        fx, name, _ = key
        logged = self._logged.pop(key)
        if len(self._samples) == 1:
            log(fx, name, logged[0].value, **logged[0].settings)
            return
        value, settings = merged_entry(logged, self._largest_batch)
        log(fx, name, value, **settings)


def cut_in_pieces(cutter: BatchCutter, batch: Any, sizes: Sequence[int]) -> Iterator[tuple[Any, int, bool]]:
    """Yield each piece of a batch when it is asked for, its samples, and whether it is the last; one piece is uncut."""
    start = 0
    for number, size in enumerate(sizes, 1):
        piece = cutter.cut(batch, start, start + size) if len(sizes) > 1 else batch
        yield piece, size, number == len(sizes)
        start += size


def merge(outputs: Sequence[Any], samples: Sequence[int], shares: Sequence[float], *, is_loss: bool = False) -> Any:
    """Merge what a step returned for the pieces of a batch; graphs and subclasses of tensors are left behind.

    - Tensors, arrays and lists as long as their piece are joined, and lists whose lengths differ.
    - Numbers and tensors of one element are averaged by share, unless all are equal; a piece of share 0 is left
      out. A ``loss`` of one element is averaged also if each piece has one sample. Whole numbers of Python
      that equal the samples of their pieces are counts of these, and are added up.
    - Containers are merged field by field. ``None`` in some pieces is skipped.
    - Anything else is the value if all are equal, otherwise the list of the values.
    """
    there = [part for part in zip(outputs, samples, shares) if part[0] is not None]
    if not there:
        return None
    values, sizes, value_shares = map(list, zip(*there))
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _merged_tensors([*map(_plain, values)], sizes, value_shares, is_loss=is_loss)
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in values):
        return _merged_numbers(values, sizes, value_shares)
    if any(type(value) is not type(first) for value in values) or isinstance(first, PackedSequence):
        return _same(values)
    if isinstance(first, np.ndarray) and _are_by_sample(values, sizes):
        return np.concatenate(values)
    if isinstance(first, list):
        lengths = [*map(len, values)]
        if lengths == sizes or len({*lengths}) > 1:
            return rebuild(first, [*chain.from_iterable(map(_plain, values))])
    if open_container(first) is None:
        return _same(values)
    return _merged_fields(values, sizes, value_shares)


def _merged_fields(values: list[Any], samples: list[int], shares: list[float]) -> Any:
    """Merge containers of one type field by field; keys of a dictionary may be missing in some."""
    whole = values[0]
    children = [dict(open_container(value) or ()) for value in values]
    names = dict.fromkeys(chain(*children))
    is_ragged = any(len(fields) < len(names) for fields in children)
    if is_ragged and not isinstance(whole, dict):
        return _same(values)
    if is_ragged:
        whole = dict.fromkeys(chain(*values))
    merged = []
    for name in names:
        parts = [fields.get(name) for fields in children]
        merged.append(merge(parts, samples, shares, is_loss=name in _LOSS))
    return rebuild(whole, merged)


def _merged_numbers(values: list[Any], samples: list[int], shares: list[float]) -> Any:
    if values == samples and max(samples) > 1:  # among pieces of one sample, a 1 may be no count
        return sum(samples)
    if _are_equal(values):
        return values[0]
    return mean([*torch.tensor(values, dtype=torch.float64)], shares).item()


def _merged_tensors(tensors: list[Tensor], samples: list[int], shares: list[float], *, is_loss: bool) -> Any:
    if any(tensor.is_nested for tensor in tensors):
        return tensors
    are_numbers = all(tensor.numel() == 1 and tensor.dtype != torch.bool for tensor in tensors)
    if _are_by_sample(tensors, samples) and not (is_loss and are_numbers):
        return torch.cat(tensors)
    if are_numbers and (tensors[0].is_floating_point() or not _are_equal(tensors)):  # a comparison waits for the device
        return mean(tensors, shares)
    return _same(tensors)


def _are_by_sample(values: Sequence[Any], samples: Sequence[int]) -> bool:
    """Return whether the first axis is that of the piece's samples, so that tensors or arrays can be joined."""
    if not all(value.ndim and len(value) == size for value, size in zip(values, samples)):
        return False
    return len({tuple(value.shape[1:]) for value in values}) == 1


def _are_equal(values: Sequence[Any]) -> bool:
    return all(same_values(values[0], value) for value in values[1:])


def _same(values: list[Any]) -> Any:
    plain_values = [*map(_plain, values)]
    return plain_values[0] if _are_equal(values) else plain_values


def _plain(node: Any) -> Any:
    children = open_container(node)
    if children is None:
        return plain(node)
    return rebuild(node, [_plain(child) for _, child in children])
