"""Batches of known samples, and whether two batches are the same."""

import random
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from lightning_ga.batch.pytree import open_container


class Known:
    """Batches of known samples, one collate function for each loader."""

    larger = (4, 9)

    def __init__(
        self, samples: Sequence[Any], *collate: Callable[[list[Any]], Any], join: Callable[[list[Any]], Any] = list
    ) -> None:
        self.samples, self.collate, self.join = samples, collate, join
        self.kinds, self.loaders = len(samples), len(collate)

    def batch(self, counts: Sequence[int], kinds: Sequence[int], seed: int = 0) -> Any:
        torch.manual_seed(seed)
        random.seed(seed)
        batches = [
            collate([self.samples[kinds[place % len(kinds)]] for place in range(count)])
            for collate, count in zip(self.collate, counts)
        ]
        return batches[0] if self.loaders == 1 else self.join(batches)


class BatchEncoding(UserDict[str, Any]):
    """As in transformers: a mapping, with encodings by sample beside it and attributes for its keys."""

    def __init__(self, data: dict[str, Any], encoding: list[Any], n_sequences: int) -> None:
        super().__init__(data)
        self._encodings = encoding
        self._n_sequences = n_sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, PackedSequence):
        return same(list(unpack_sequence(one)), list(unpack_sequence(other)))
    mine, theirs = open_container(one), open_container(other)
    if mine is None or theirs is None:
        return bool(one == other)
    return [name for name, _ in mine] == [name for name, _ in theirs] and all(
        same(a, b) for (_, a), (_, b) in zip(mine, theirs)
    )
