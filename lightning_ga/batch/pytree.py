"""Open the containers that batches are made of, and rebuild them with their type and all else they hold.

A *leaf* has a length of its own: a tensor, an array, a packed sequence, anything registered. A
*record* has fields: a mapping, a named tuple, a dataclass, or a list of values of several kinds. A
*series* is a list or tuple of values of one kind, which may be fields or samples. A *constant*
(``None``, a string, a number, a tensor of no dimension) holds for every sample.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")
Kind = Literal["leaf", "constant", "series", "record", "opaque"]

_CONSTANTS = (
    *(str, bytes, Number, type(None), Enum, PurePath, date, time, timedelta),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Splitter:
    """The functions by which a registered type is cut.

    Attributes:
        count: Returns the number of samples of a value.
        take: Returns the samples from ``start`` up to but without ``stop``, as a value of the same type.
    """

    count: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]


_SPLITTERS: dict[type, Splitter] = {}


def register_splitter(kind: type[T], *, count: Callable[[T], int], take: Callable[[T, int, int], Any]) -> None:
    """Register how values of a type, and of its subclasses, are cut wherever they are in a batch.

    Args:
        kind: The type.
        count: Called with a value: how many samples it holds.
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


_OF_GRAPHS = Splitter(
    count=lambda batch: int(batch.num_graphs),
    take=lambda batch, start, stop: type(batch).from_data_list(batch.to_data_list()[start:stop]),
)


def leaf_length(node: Any) -> int | None:
    """Return the length along the sample axis; ``None`` for a value that has no such axis.

    Examples:
        >>> leaf_length(torch.zeros(3, 7)), leaf_length(torch.tensor(1.0)), leaf_length([1, 2])
        (3, None, None)
    """
    if is_plain_sequence(node) and find_splitter(node) is None:
        return None
    lengths = extents(node)
    return None if lengths is None else lengths[0]


def extents(node: Any) -> tuple[int, ...] | None:
    """Return the extents of a value along the axes that may be the sample axis; ``None`` if it has none.

    Examples:
        >>> extents(torch.zeros(3, 7)), extents(["a", "b"]), extents(torch.tensor(1.0)), extents({"x": 1})
        ((3, 7), (2,), None, None)
    """
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


def is_constant(node: Any) -> bool:
    """Return whether a value is a text, a number, a tensor of no dimension, or another single value."""
    if find_splitter(node) is not None:
        return False
    if isinstance(node, torch.Tensor):
        return not node.is_nested and not node.dim()
    return isinstance(node, _CONSTANTS) or (is_array(node) and not node.shape)


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values of any structure are equal, NaN included; unknown types are compared by ``==``.

    Examples:
        >>> same_values({"x": torch.tensor([1.0, float("nan")])}, {"x": torch.tensor([1.0, float("nan")])})
        True
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, torch.Tensor):
            return _same_tensors(one, other)
        if is_array(one):
            return bool(one.shape == other.shape) and _same_tensors(torch.as_tensor(one), torch.as_tensor(other))
        if isinstance(one, float):
            return one == other or (one != one and other != other)
        children = open_container(one), open_container(other)
        if children[0] is not None and children[1] is not None:
            names = [[name for name, _ in opened] for opened in children if opened is not None]
            pairs = zip(children[0], children[1])
            return names[0] == names[1] and all(same_values(a, b) for (_, a), (_, b) in pairs)
        if "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)} and hasattr(
            one, "__dict__"
        ):
            return same_values(vars(one), vars(other))
        return bool(one == other)
    except Exception:  # arrays of objects; the == of a user's type may raise anything
        return _same_text(one, other)


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if one.is_nested:
        parts = list(zip(one.unbind(), other.unbind()))
        return one.size(0) == other.size(0) and all(_same_tensors(a, b) for a, b in parts)
    if one.shape != other.shape:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    one, other = one.detach().as_subclass(torch.Tensor), other.detach().as_subclass(torch.Tensor)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _same_text(one: Any, other: Any) -> bool:
    return hasattr(one, "tolist") and hasattr(other, "tolist") and str(one.tolist()) == str(other.tolist())


def is_array(node: Any) -> bool:
    """Return whether a value is cut by slicing it: arrays of numpy and others, data frames, ``TensorDict``."""
    if isinstance(node, (dict, UserDict, torch.Tensor)) or dataclasses.is_dataclass(node):
        return False  # a field may be called shape
    return isinstance(getattr(node, "shape", None), tuple) and hasattr(type(node), "__getitem__")


def kind_of(node: Any) -> Kind:
    """Return which of the kinds above a value is; ``"opaque"`` where its type does not show samples."""
    if leaf_length(node) is not None:
        return "leaf"
    if isinstance(node, (*_CONSTANTS, torch.Tensor)) or is_array(node):
        return "constant"
    if is_plain_sequence(node):
        return "series" if _of_one_kind(node) else "record"
    return "opaque" if open_container(node) is None else "record"


def is_plain_sequence(node: Any) -> bool:
    """Return whether a value is a list or a tuple without names."""
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def open_container(node: Any) -> list[tuple[str, Any]] | None:
    """Return the children of a container, each with its path from there; ``None`` for anything else.

    Examples:
        >>> open_container({"ids": 1, "mask": 2})
        [("['ids']", 1), ("['mask']", 2)]
    """
    if (names := _attribute_names(node)) is not None:
        return [(f".{name}", getattr(node, name)) for name in names]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return None


def rebuild(node: Any, children: Iterable[Any]) -> Any:
    """Return a container like ``node`` with other children, in the order of ``open_container``.

    Containers are copied rather than constructed where possible: so frozen dataclasses, fields that
    ``__post_init__`` computes and ``BatchEncoding`` keep what else they hold.

    Examples:
        >>> from collections import OrderedDict
        >>> rebuild(OrderedDict(ids=1, mask=2), [3, 4]) == OrderedDict(ids=3, mask=4)
        True
    """
    if isinstance(node, tuple):
        make: Callable[[Iterable[Any]], Any] = getattr(type(node), "_make", type(node))
        return make(children)
    names = _attribute_names(node)
    if names is None and not isinstance(node, (dict, list)):
        return type(node)(dict(zip(node, children)))  # a copy of another mapping may share its contents
    clone: Any = copy.copy(node)
    if names is not None:
        for name, child in zip(names, children):
            object.__setattr__(clone, name, child)
    elif isinstance(node, list):
        clone[:] = children
    else:
        for key, child in zip(node, children):
            clone[key] = child
    return clone


def _attribute_names(node: Any) -> list[str] | None:
    """Return the attributes by which a container is opened; ``None`` for others and mappings (``ModelOutput``)."""
    if isinstance(node, tuple):
        return list(node._fields) if hasattr(node, "_fields") else None
    if isinstance(node, (list, dict)):
        return None
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return list(dict.fromkeys([*fields, *getattr(node, "__dict__", {})]))
    # BatchEncoding keeps a list of encodings beside the mapping, one for each sample.
    return list(vars(node)) if isinstance(node, (UserDict, SimpleNamespace)) else None


def _of_one_kind(sequence: Sequence[Any]) -> bool:
    """Return whether all values in a sequence are of one kind; ``None`` matches any."""
    things = [thing for thing in sequence if thing is not None]
    if things and all(isinstance(thing, Mapping) for thing in things) and any(things):
        return bool(set.intersection(*(set(thing) for thing in things)))  # (inputs, targets) have no key in common
    return bool(sequence) and len({_sort(thing) for thing in things}) <= 1


def _sort(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor) and thing.dim():
        return torch.Tensor, thing.dtype, thing.dim()
    if is_array(thing) and thing.shape:
        return type(thing), len(thing.shape)
    return "constant" if isinstance(thing, (*_CONSTANTS, torch.Tensor)) else type(thing)
