"""A seeded permutation that is computed index by index: any size, no memory, no time to start.

``torch.randperm`` stores the whole epoch, which for 10⁹ samples takes 4 GB on every rank and
most of a minute. Here the sample at any position is a formula of seed, epoch and position.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import isqrt
from typing import Any

import torch

_ROUNDS = 8  # four are the least that look random (Luby and Rackoff, 1988); with six, orders of ten still do not
# Multipliers that spread every bit of a product over its upper half (Steele, Lea and Flood, 2014).
_SPREAD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)
_UNMIXED = 20  # lower bits of a product, left out; what remains can be added to any half without overflow


class Permutation(Sequence[int]):
    """The numbers from 0 to ``size`` - 1 in an order that seed and epoch determine.

    A Feistel network over a rectangle: a number is column + row × width, and in turn the column is
    shifted by a random function of the row and the row by one of the column, each modulo its
    length. Every shift can be undone, so the whole is a permutation of the rectangle; a number
    that lands beyond ``size`` walks on until it lands within (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains"). The rectangle exceeds ``size`` by less than its square
    root, so hardly any has to.

    The order is the same on every machine and with every version of PyTorch. ``size`` must be below 2⁶².

    Examples:
        >>> order = Permutation(10**12, seed=1, epoch=0)
        >>> len(order[5:8]), order[5:8] == [order[place] for place in (5, 6, 7)]
        (3, True)
        >>> sorted(Permutation(7, seed=1, epoch=0))
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if not 1 <= size < 2**62:
            raise ValueError(f"{size=} must be at least 1 and below 2**62.")
        self._size = size
        self._width = isqrt(size - 1) + 1
        self._height = -(-size // self._width)
        digest = blake2b(f"{seed},{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, len(digest), 8)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return one number, or a slice of the order as a list."""
        if not isinstance(index, slice):
            place = range(self._size)[index]
            return self._at(torch.tensor([place])).item()
        places = range(*index.indices(self._size))
        return self._at(torch.arange(places.start, places.stop, places.step)).tolist() if places else []

    def _at(self, places: torch.Tensor) -> torch.Tensor:
        numbers = self._shuffle(places)
        beyond = (numbers >= self._size).nonzero().flatten()
        while beyond.numel():
            walked = self._shuffle(numbers[beyond])
            numbers[beyond] = walked
            beyond = beyond[walked >= self._size]
        return numbers

    def _shuffle(self, numbers: torch.Tensor) -> torch.Tensor:
        """Permute the whole rectangle."""
        row = numbers // self._width
        column = numbers - row * self._width
        for row_key, column_key in zip(self._keys[::2], self._keys[1::2]):
            row = row.add_(_scatter(column, row_key)).remainder_(self._height)
            column = column.add_(_scatter(row, column_key)).remainder_(self._width)
        return row.mul_(self._width).add_(column)


def _scatter(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """Return a pseudo-random function of the numbers: 44 bits, signed, that depend on every bit of number and key."""
    mixed = (numbers + key).mul_(_SPREAD[0])
    return mixed.bitwise_xor_(mixed >> 32).mul_(_SPREAD[1]).bitwise_right_shift_(_UNMIXED)
