"""The containers and values that batches are made of: open, rebuild and compare them, and take samples out of them."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from itertools import count
from numbers import Number
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

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


_PARTS = WeakValueDictionary[Any, torch.Tensor]()  # offsets of parts of jagged tensors, by ragged size and place
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
    if _SPLITTERS:
        for base in type(node).__mro__:
            if base in _SPLITTERS:
                return _SPLITTERS[base]
    methods = (getattr(type(node), name, None) for name in ("to_data_list", "from_data_list"))
    return _OF_GRAPHS if all(map(callable, methods)) and hasattr(node, "num_graphs") else None


def is_constant(node: Any) -> bool:
    """Return whether a value is a text, a number, a tensor of no dimension, or another single value."""
    if find_splitter(node) is not None:
        return False
    if isinstance(node, torch.Tensor):
        return not node.is_nested and not node.dim()
    return isinstance(node, _CONSTANTS) or (is_array(node) and not node.shape and not isinstance(node, Mapping))


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
    return None if isinstance(node, (list, tuple, dict, UserDict)) else SUPPORTED_NODES.get(type(node))


def is_plain_sequence(node: Any) -> bool:
    """Return whether a value is a list or a tuple without names."""
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def extents(node: Any) -> tuple[int, ...] | None:
    """Return the extents of a value along the axes that may be the sample axis; ``None`` if it has none."""
    if (splitter := find_splitter(node)) is not None:
        return (splitter.count(node),)
    if isinstance(node, PackedSequence):
        return (int(node.batch_sizes[0]) if len(node.batch_sizes) else 0,)
    if isinstance(node, torch.Tensor):
        return (node.size(0),) if node.is_nested else tuple(node.shape) or None
    if is_plain_sequence(node):
        return (len(node),)
    if not is_array(node):
        return None
    return (len(node),) if hasattr(node, "iloc") else tuple(node.shape) or None


def open_container(node: Any) -> list[tuple[str, Any]] | None:
    """Return the children of a container, each with its path from there; ``None`` for anything else."""
    names = _attribute_names(node)
    if names is not None:
        return [(f".{name}", getattr(node, name)) for name in names]
    registration = _registration(node)
    if registration is not None:
        children = registration.flatten_fn(node)[0]
        keys = list(node.keys()) if isinstance(node, Mapping) else []
        return [(f"[{key!r}]", child) for key, child in zip(keys if len(keys) == len(children) else count(), children)]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return None


def contents_of(node: Any) -> dict[str, Any]:
    """Return the attributes of an object, of a class of the user's own, that are tensors, arrays, mappings or lists."""
    if isinstance(node, torch.Tensor) or open_container(node) is not None or is_constant(node):
        return {}
    own = getattr(node, "__dict__", {})
    return {name: value for name, value in own.items() if isinstance(value, _CONTENTS) or is_array(value)}


def walk(
    node: Any, leaf_of: Callable[[Any], Any], path: str = "", inside: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf in a value, and what ``leaf_of`` returns of it, which is ``None`` for containers.

    Objects ``inside`` of which the value is are left out: an object may contain itself.
    """
    found = leaf_of(node)
    if found is not None:
        yield path, found
    elif id(node) not in inside:
        children = open_container(node)
        for name, child in contents_of(node).items() if children is None else children:
            yield from walk(child, leaf_of, path + name, (*inside, id(node)))


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, at any depth."""
    return (tensor for _, tensor in walk(node, lambda leaf: leaf if isinstance(leaf, torch.Tensor) else None))


def rebuild(node: Any, children: Iterable[Any]) -> Any:
    """Return a container like ``node`` with other children, a copy if possible, which keeps other attributes."""
    if isinstance(node, tuple):
        return getattr(type(node), "_make", type(node))(children)
    names = _attribute_names(node)
    registration = _registration(node) if names is None else None
    if registration is not None:
        return registration.unflatten_fn(list(children), registration.flatten_fn(node)[1])
    if names is None and not isinstance(node, (dict, list)):
        return type(node)(dict(zip(node.keys(), children)))  # a copy of another mapping may share its contents
    clone: Any = copy.copy(node)
    if isinstance(node, list):
        clone[:] = children
    elif names is None:
        for key, child in zip(node, children):  # ``update`` may be refused (``ModelOutput``)
            clone[key] = child
    else:
        for name, child in zip(names, children):
            object.__setattr__(clone, name, child)
    return clone


def _attribute_names(node: Any) -> list[str] | None:
    """Return the attributes by which a container is opened; ``None`` for others and mappings (``ModelOutput``)."""
    if isinstance(node, tuple):
        return list(node._fields) if hasattr(node, "_fields") else None
    if isinstance(node, (list, dict)):
        return None
    if dataclasses.is_dataclass(node) and not isinstance(node, type) and not _is_tensor_collection(node):
        fields = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return list(dict.fromkeys([*fields, *getattr(node, "__dict__", {})]))
    # BatchEncoding keeps a list of encodings beside the mapping, one for each sample.
    return list(vars(node)) if isinstance(node, (UserDict, SimpleNamespace)) else None


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values of any structure are equal, NaN included; unknown types are compared by ``==``."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, torch.Tensor):
            return _same_tensors(one, other)
        mine = open_container(one)
        theirs = open_container(other)
        if mine is not None and theirs is not None:
            pairs = list(zip(mine, theirs))
            return len(mine) == len(theirs) and all(a == b and same_values(x, y) for (a, x), (b, y) in pairs)
        if is_array(one):
            return bool(one.shape == other.shape) and _same_tensors(torch.as_tensor(one), torch.as_tensor(other))
        if isinstance(one, float):
            return one == other or (one != one and other != other)
        if isinstance(one, _CONSTANTS) or one == other:
            return bool(one == other)
        held = object.__getstate__(one)  # with what __slots__ name; many objects are equal only to themselves
        return held is not None and same_values(held, object.__getstate__(other))
    except Exception:  # arrays of objects; the == of a user's type may raise anything
        return hasattr(one, "tolist") and str(one.tolist()) == str(other.tolist())


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if one.is_nested:
        return one.size(0) == other.size(0) and all(map(_same_tensors, one.unbind(), other.unbind()))
    one, other = (each.detach().to_dense().as_subclass(torch.Tensor) for each in (one, other))
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def take(node: Any, axis: int, start: int, stop: int) -> Any:
    """Return the entries ``start`` to ``stop - 1`` of a value; the axis is 0 for all but tensors and arrays.

    Dense tensors and arrays come as views; packed, sparse and nested tensors copy at most what is taken.
    """
    if (splitter := find_splitter(node)) is not None:
        return splitter.take(node, start, stop)
    if isinstance(node, PackedSequence):
        return _take_sequences(node, start, stop)
    if isinstance(node, torch.Tensor):
        return _take_tensor(node, axis, start, stop)
    if is_plain_sequence(node):
        return rebuild(node, node[start:stop])
    rows = getattr(node, "iloc", node)  # data frames are indexed by label otherwise
    return rows[(*(slice(None),) * axis, slice(start, stop))]


def _take_tensor(tensor: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
    if tensor.layout is torch.jagged and tensor.lengths() is None:  # type: ignore[attr-defined]  # of nested tensors
        return _take_jagged(tensor, start, stop)
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]), layout=tensor.layout)
    if tensor.layout != torch.strided:  # sparse tensors have no views along an axis
        part = torch.narrow_copy(tensor.to_sparse(layout=torch.sparse_coo), axis, start, stop - start)
        return part if tensor.layout == torch.sparse_coo else part.to_sparse(layout=tensor.layout)
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.narrow(axis, start, stop - start)
    part = tensor[(*(slice(None),) * axis, slice(start, stop))]  # by the class's own means
    if type(part) is not type(tensor):
        part = part.as_subclass(type(tensor))  # views of torchvision's tensors are plain tensors
    for name, value in vars(tensor).items():
        if name in vars(part):
            continue
        # An image size or a format is that of any samples; what else a slice lacks may be by sample.
        if not is_constant(value) and not (isinstance(value, tuple) and all(map(is_constant, value))):
            raise LayoutError(
                f"Slices of a {type(tensor).__name__} lack its attribute {name!r}, so the batch cannot be cut: let its "
                f"__getitem__ cut that, too, or {REMEDY}."
            )
        setattr(part, name, value)
    return part


def _take_jagged(tensor: Any, start: int, stop: int) -> torch.Tensor:
    """Return samples of a jagged tensor as a view; parts of tensors that share their offsets share theirs, too.

    Otherwise torch would refuse to compute with both. Tensors that were moved have offsets of their own, but the same
    ragged size.
    """
    axis = tensor._ragged_idx
    offsets = tensor.offsets()
    place = (tensor.shape[axis], start, stop, offsets.device)
    part = _PARTS.get(place)
    if part is None:
        part = offsets[start : stop + 1] - offsets[start]
        _PARTS[place] = part
    first, end = offsets[[start, stop]].tolist()
    values = torch.narrow(tensor.values(), axis - 1, first, end - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets=part, jagged_dim=axis)


def _take_sequences(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Take whole sequences of a packed batch, which contains one step after another, the longest sequences first."""
    batch_sizes = packed.batch_sizes
    unsorted = packed.unsorted_indices
    wanted = torch.arange(start, stop) if unsorted is None else unsorted[start:stop].cpu()
    places, order = wanted.sort()  # longest first, as they are
    there = places < batch_sizes[:, None]
    rows = (batch_sizes.cumsum(0) - batch_sizes)[:, None] + places
    sizes = there.sum(1)
    data = packed.data[rows[there].to(packed.data.device)]
    if unsorted is None:
        return PackedSequence(data, sizes[sizes > 0])
    indices = order.to(unsorted.device)
    return PackedSequence(data, sizes[sizes > 0], indices, indices.argsort())
