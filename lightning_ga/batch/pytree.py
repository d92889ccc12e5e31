"""The containers that batches are made of: open them, rebuild them, and compare what they contain.

A container is opened by what Python or ``torch.utils._pytree`` knows of it: keys of mappings, entries of lists and
tuples, fields of named tuples and dataclasses, registrations. The exceptions are types of a few libraries: batches of
torch_geometric (``find_splitter``), ``BatchEncoding`` and tensorclasses (``_attribute_names``).
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from lightning_ga.errors import UserError

T = TypeVar("T")
REMEDY = "define split_batch(self, batch, sizes) on the LightningModule"

_CONSTANTS = (
    *(str, bytes, Number, type(None), Enum, PurePath, date, time, timedelta),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)


_CONTENTS = (torch.Tensor, Mapping, list)


class LayoutError(UserError):
    """A batch whose samples cannot be separated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splitter:
    """The functions by which a registered type is cut: see ``register_splitter``."""

    count: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]


_SPLITTERS: dict[type, Splitter] = {}
_OF_GRAPHS = Splitter(
    count=lambda batch: int(batch.num_graphs),
    take=lambda batch, start, stop: type(batch).from_data_list(batch.to_data_list()[start:stop]),
)


def register_splitter(kind: type[T], *, count: Callable[[T], int], take: Callable[[T, int, int], Any]) -> None:
    """Register how values of a type, and of its subclasses, are cut wherever they are in a batch.

    Args:
        kind: The type.
        count: Called with a value; returns its number of samples.
        take: Called with a value, ``start`` and ``stop``: the samples ``start`` to ``stop - 1`` as a value.

    Examples:
        Batches that keep their samples in a list::

            register_splitter(
                Bag,
                count=lambda bag: len(bag.items),
                take=lambda bag, start, stop: Bag(bag.items[start:stop]),
            )
    """
    _SPLITTERS[kind] = Splitter(count, take)


def find_splitter(node: Any) -> Splitter | None:
    """Return the splitter of a value's type or its nearest registered base; ``None`` if there is none.

    Batches of torch_geometric need no registration.
    """
    kind = type(node)
    for base in kind.__mro__:
        if base in _SPLITTERS:
            return _SPLITTERS[base]
    if hasattr(kind, "to_data_list") and hasattr(kind, "from_data_list") and hasattr(node, "num_graphs"):
        return _OF_GRAPHS
    return None


def is_constant(node: Any) -> bool:
    """Return whether a value is a text, a number, a tensor of no dimension, or another single value."""
    if find_splitter(node) is not None:
        return False
    if isinstance(node, torch.Tensor):
        return not node.is_nested and not node.dim()
    if isinstance(node, Mapping):  # one of a type of its own may have a shape of no axes
        return False
    return isinstance(node, _CONSTANTS) or (is_array(node) and not node.shape)


def is_array(node: Any) -> bool:
    """Return whether a value is cut by slicing it: arrays of numpy and others, data frames, ``TensorDict``."""
    if _is_tensor_collection(node):
        return len(node.batch_size) > 0
    if isinstance(node, (dict, UserDict, torch.Tensor)) or dataclasses.is_dataclass(node):
        return False  # a field may be called shape
    return isinstance(getattr(node, "shape", None), tuple) and hasattr(type(node), "__getitem__")


def _is_tensor_collection(node: Any) -> bool:
    """Return whether a value is a ``TensorDict`` or a tensorclass, whose tensors share the axes of ``batch_size``."""
    return isinstance(getattr(node, "batch_size", None), torch.Size) and _registration(node) is not None


def _registration(node: Any) -> Any:
    """Return how ``torch.utils._pytree`` opens a container that is opened by none of Python's own means."""
    if isinstance(node, (list, tuple, dict, UserDict)):
        return None
    return SUPPORTED_NODES.get(type(node))


def is_plain_sequence(node: Any) -> bool:
    """Return whether a value is a list or a tuple without names."""
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def extents(node: Any) -> tuple[int, ...] | None:
    """Return the extents of a value along the axes that may be the sample axis; ``None`` if it has none."""
    splitter = find_splitter(node)
    if splitter is not None:
        return (splitter.count(node),)
    if isinstance(node, PackedSequence):
        return (max(node.batch_sizes.tolist(), default=0),)
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            return (node.size(0),)
        return tuple(node.shape) or None
    if is_plain_sequence(node) or hasattr(node, "iloc"):  # a data frame has columns, but is cut by rows
        return (len(node),)
    if is_array(node):
        return tuple(node.shape) or None
    return None


def is_opened(node: Any) -> bool:
    """Return whether the parts of a value may have samples of their own, and not only the value as a whole."""
    return extents(node) is None or is_plain_sequence(node)


def open_container(node: Any) -> list[tuple[str, Any]] | None:
    """Return the children of a container, each with its path from there; ``None`` for anything else."""
    names = _attribute_names(node)
    if names is not None:
        return [(f".{name}", getattr(node, name)) for name in names]
    registration = _registration(node)
    entries: Iterable[tuple[Any, Any]]
    if registration is not None:
        children = registration.flatten_fn(node)[0]
        entries = enumerate(children)
        if isinstance(node, Mapping) and len(node.keys()) == len(children):  # ``len`` of a TensorDict counts its rows
            entries = zip(node.keys(), children)
    elif isinstance(node, Mapping):
        entries = node.items()
    elif isinstance(node, (list, tuple)):
        entries = enumerate(node)
    else:
        return None
    return [(f"[{key!r}]", child) for key, child in entries]


def contents_of(node: Any) -> dict[str, Any]:
    """Return the attributes of an object, of a class of the user's own, that are tensors, arrays, mappings or lists."""
    if isinstance(node, (torch.Tensor, torch.nn.Module)) or open_container(node) is not None or is_constant(node):
        return {}
    return {
        name: value
        for name, value in getattr(node, "__dict__", {}).items()
        if isinstance(value, _CONTENTS) or is_array(value)
    }


def walk(
    node: Any, leaf_of: Callable[[Any], Any], path: str = "", inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf in a value, and what ``leaf_of`` returns of it, which is ``None`` for containers.

    Objects ``inside`` of which the value is are left out: an object may contain itself.
    """
    leaf = leaf_of(node)
    if leaf is not None:
        yield path, leaf
    elif id(node) not in inside:
        children = open_container(node)
        if children is None:
            children = [*contents_of(node).items()]
        for name, child in children:
            yield from walk(child, leaf_of, path + name, (*inside, id(node)))


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, at any depth."""
    for _, tensor in walk(node, lambda each: each if isinstance(each, torch.Tensor) else None):
        yield tensor


def rebuild(node: Any, children: Iterable[Any]) -> Any:
    """Return a container like ``node`` with other children, a copy if possible, which keeps other attributes."""
    if isinstance(node, tuple):
        return getattr(type(node), "_make", type(node))(children)
    names = _attribute_names(node)
    if names is not None:
        clone: Any = copy.copy(node)
        for name, child in zip(names, children):
            object.__setattr__(clone, name, child)
        return clone
    registration = _registration(node)
    if registration is not None:
        return registration.unflatten_fn(list(children), registration.flatten_fn(node)[1])
    if isinstance(node, list):
        clone = copy.copy(node)
        clone[:] = children
        return clone
    if isinstance(node, dict):
        clone = copy.copy(node)
        for key, child in zip(node, children):  # ``update`` may be refused (``ModelOutput``)
            clone[key] = child
        return clone
    return type(node)(dict(zip(node.keys(), children)))  # a copy of another mapping may share its contents


def _attribute_names(node: Any) -> list[str] | None:
    """Return the attributes by which a container is opened; ``None`` for others and mappings (``ModelOutput``)."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(node._fields)
    # BatchEncoding keeps a list of encodings beside the mapping, one for each sample.
    if isinstance(node, (UserDict, SimpleNamespace)):
        return list(vars(node))
    if isinstance(node, (list, tuple, dict, type)) or not dataclasses.is_dataclass(node) or _is_tensor_collection(node):
        return None
    names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    return list(dict.fromkeys([*names, *getattr(node, "__dict__", {})]))


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values of any structure are equal, NaN included; unknown types are compared by ``==``."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return _same_values_of_type(one, other)
    except (torch.OutOfMemoryError, MemoryError):
        raise  # it says nothing of the values
    except Exception:  # the == of a user's type may raise anything
        return False


def _same_values_of_type(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other)
    children = open_container(one)
    others = open_container(other)
    if children is not None and others is not None:
        ours = dict(children)
        theirs = dict(others)
        return [*ours] == [*theirs] and all(map(same_values, ours.values(), theirs.values()))
    if is_array(one):
        return _same_arrays(one, other)
    if one == other or (isinstance(one, float) and one != one and other != other):
        return True
    if isinstance(one, _CONSTANTS):
        return False
    state = object.__getstate__(one)  # with what __slots__ name; many objects are equal only to themselves
    return state is not None and same_values(state, object.__getstate__(other))


def _same_arrays(one: Any, other: Any) -> bool:
    if hasattr(one, "equals"):  # data frames and their columns
        return bool(one.equals(other))
    ours = np.asarray(one)
    theirs = np.asarray(other)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if ours.dtype.hasobject:
        return all(map(same_values, ours.flat, theirs.flat))
    return bool(np.array_equal(ours, theirs, equal_nan=ours.dtype.kind in "fcmM"))


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if one.is_nested:
        return one.size(0) == other.size(0) and all(map(_same_tensors, one.unbind(), other.unbind()))
    one = one.detach().to_dense().as_subclass(torch.Tensor)
    other = other.detach().to_dense().as_subclass(torch.Tensor)
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
