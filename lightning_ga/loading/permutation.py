"""A seeded permutation that is computed index by index: ``torch.randperm`` takes 4 GB on every rank for 10⁹ samples."""

from math import isqrt

import torch

_ROUNDS = 4  # two are the least that look random (Luby and Rackoff, 1988); with three, orders of ten still do not


class Permutation:
    """The numbers from 0 to ``size`` - 1 in an order that a seed determines; slices of it are computed.

    A Feistel network over a rectangle: a number is column + row × width, and in turn the column is shifted by a
    random number of its row and the row by one of its column, each modulo its length. Every shift can be undone, so
    the whole is a permutation of the rectangle; a number that lands beyond ``size`` walks on until it lands within
    (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains"). Hardly any has to: the rectangle exceeds
    ``size`` by less than its square root.

    Examples:
        >>> sorted(Permutation(7, seed=1)[0:7].tolist())
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, size: int, *, seed: int) -> None:
        self._size, self._width = size, isqrt(size - 1) + 1
        self._height = -(-size // self._width)
        generator = torch.Generator().manual_seed(seed)
        self._of_columns = torch.randint(self._height, (_ROUNDS, self._width), generator=generator)
        self._of_rows = torch.randint(self._width, (_ROUNDS, self._height), generator=generator)

    def __getitem__(self, places: slice) -> torch.Tensor:
        numbers = self._shuffled(torch.tensor(range(self._size)[places], dtype=torch.int64))
        while (beyond := numbers >= self._size).any():
            numbers[beyond] = self._shuffled(numbers[beyond])
        return numbers

    def _shuffled(self, numbers: torch.Tensor) -> torch.Tensor:
        """Permute the whole rectangle."""
        row, column = numbers // self._width, numbers % self._width
        for of_columns, of_rows in zip(self._of_columns, self._of_rows):
            row = (row + of_columns[column]) % self._height
            column = (column + of_rows[row]) % self._width
        return row * self._width + column
