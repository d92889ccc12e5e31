"""Containers are opened by what torch knows of them, and not by what they inherit from."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from lightning_ga.batch.pytree import is_constant, open_container, rebuild, same_values
from lightning_ga.batch.read_layout import read_ready_made
from lightning_ga.snapshot.copies import with_own_containers


class Rows(Mapping[str, Any]):
    """As a ``TensorDict``: a mapping that iterates over its rows, and has the shape of them, or none."""

    def __init__(self, data: dict[str, Any], batch_size: tuple[int, ...] = ()) -> None:
        self.data, self.batch_size = dict(data), torch.Size(batch_size)

    @property
    def shape(self) -> torch.Size:
        return self.batch_size

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    def __iter__(self) -> Iterator[Any]:
        assert self.batch_size, "iteration over rows that are not known"
        return (self[row] for row in range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, str):
            return self.data[place]
        part = {name: value[place] for name, value in self.data.items()}
        return Rows(part, (len(range(*place[0].indices(len(self)))),) if isinstance(place, tuple) else ())

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()


class Pair:
    """Known to torch alone."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other


class Unregistered(Rows):
    """Known to nobody."""


_pytree.register_pytree_node(
    Rows,
    lambda rows: (list(rows.values()), (list(rows.keys()), rows.batch_size)),
    lambda values, context: Rows(dict(zip(context[0], values)), context[1]),
)
_pytree.register_pytree_node(Pair, lambda pair: ([pair.one, pair.other], None), lambda values, _: Pair(*values))


def of_tensordict(batch_size: tuple[int, ...]) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict({"x": torch.arange(10.0).view(5, 2), "y": torch.arange(5)}, batch_size)


def of_tensorclass(batch_size: tuple[int, ...]) -> Any:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Fields:
        x: torch.Tensor
        y: torch.Tensor

    return Fields(x=torch.arange(10.0).view(5, 2), y=torch.arange(5), batch_size=batch_size)


def of_rows(batch_size: tuple[int, ...]) -> Any:
    return Rows({"x": torch.arange(10.0).view(5, 2), "y": torch.arange(5)}, batch_size)


def of_unregistered(batch_size: tuple[int, ...]) -> Any:
    return Unregistered({"x": torch.arange(10.0).view(5, 2), "y": torch.arange(5)})


def field(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, Mapping) else getattr(batch, name)


@pytest.mark.parametrize("batch_size", [(), (5,)])
@pytest.mark.parametrize("make", [of_rows, of_unregistered, of_tensordict, of_tensorclass])
def test_containers_of_tensors_are_cut_by_their_samples(make: Any, batch_size: tuple[int, ...]) -> None:
    """Alone and beside targets; a container of no batch size is no constant that all samples share."""
    batch = make(batch_size)
    assert not is_constant(batch)
    for whole in (batch, (batch, torch.arange(5))):
        part = read_ready_made(whole).cut(whole, 1, 3)
        inputs = part[0] if isinstance(whole, tuple) else part
        assert type(inputs) is type(batch)
        assert field(inputs, "x").tolist() == [[2.0, 3.0], [4.0, 5.0]]
        assert field(inputs, "y").tolist() == [1, 2]


@pytest.mark.parametrize("batch_size", [(), (5,)])
@pytest.mark.parametrize("make", [of_rows, of_unregistered, of_tensordict, of_tensorclass])
def test_containers_of_tensors_have_copies(make: Any, batch_size: tuple[int, ...]) -> None:
    """With the same tensors, as a step may remove some; equal to the original."""
    batch = make(batch_size)
    copied = with_own_containers(batch)
    assert copied is not batch
    assert type(copied) is type(batch)
    assert field(copied, "x").data_ptr() == field(batch, "x").data_ptr()
    assert same_values(copied, batch)
    assert not same_values(make(batch_size), rebuild(batch, [torch.zeros(5, 2), torch.zeros(5)]))


def test_what_torch_has_registered_is_opened() -> None:
    pair = Pair(torch.arange(5), [torch.arange(5.0)])
    assert [name for name, _ in open_container(pair) or ()] == ["[0]", "[1]"]
    part = read_ready_made(pair).cut(pair, 2, 4)
    assert isinstance(part, Pair)
    assert (part.one.tolist(), part.other[0].tolist()) == ([2, 3], [2.0, 3.0])


class Frame:
    """Has a shape, rows and ``equals``, as a data frame has."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.shape = rows, (len(rows),)

    def __getitem__(self, place: Any) -> Any:
        return self.rows[place]

    def equals(self, other: "Frame") -> bool:
        return self.rows == other.rows


@pytest.mark.parametrize(
    "make",
    [
        lambda number: np.array([torch.arange(5000) // (4000 - number), None], dtype=object),
        lambda number: np.frombuffer(bytes([number, 2, 3]), dtype=np.uint8),
        lambda number: np.array([np.nan, number]),
        lambda number: np.array(["a", str(number)]),
        lambda number: np.array([(number, 0.5)], dtype=[("count", "i4"), ("share", "f8")]),
        lambda number: np.array(["NaT", f"2020-01-0{number}"], dtype="datetime64[D]"),
        lambda number: Frame([number, 2]),
    ],
    ids=["objects", "read-only", "numbers", "text", "records", "dates", "frame"],
)
def test_arrays_are_compared_by_what_they_contain(make: Any) -> None:
    assert same_values(make(1), make(1))
    assert not same_values(make(1), make(2))


def test_a_comparison_for_which_memory_runs_out_says_nothing() -> None:
    """Values are not taken for different ones; any other error makes them so."""

    class Fails:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __eq__(self, other: object) -> bool:
            raise self.error

    with pytest.raises(torch.OutOfMemoryError):
        same_values([Fails(torch.OutOfMemoryError())], [Fails(torch.OutOfMemoryError())])
    assert not same_values([Fails(KeyError())], [Fails(KeyError())])
