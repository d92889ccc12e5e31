"""Read the layout of batches that come ready-made, without samples at hand: only where a single reading is possible."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

from lightning_ga.batch.layout import Layout, LayoutError, Role, SampleAxis, uncuttable, unknown_type
from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container


def read_ready_made(batches: Sequence[Any]) -> Layout:
    """Read the layout of ready-made batches of one loader, of different sizes if there are any.

    The number of samples is an extent that every part has, along one axis each. Where a part lacks it,
    batches of different sizes are compared: a part that stays the same is shared.

    Raises:
        LayoutError: If more than one reading is possible, or none.

    Examples:
        >>> import torch
        >>> read_ready_made([[torch.zeros(8, 7), torch.zeros(8)]]).roles["batch[0]"]
        SampleAxis(axis=0, per=1, loader=0)
    """
    if not batches:
        raise uncuttable("none was looked at before training")
    parts = [list(_parts("batch", batch, top=True)) for batch in batches]
    leaves = [{path: node for path, node, role in found if role is None} for found in parts]
    same = all(set(found) == set(leaves[0]) for found in leaves)
    axes = {path: _axes([extents(found[path]) or () for found in leaves]) for path in leaves[0]} if same else {}
    samples = _only_reading(axes, len(batches))
    if samples is None or any(_is_of_numbers(node) and samples in axes[path] for path, node in leaves[0].items()):
        raise _ambiguous(leaves[0])
    roles = {path: role for path, _, role in parts[0] if role is not None}
    for path, found in axes.items():
        roles[path] = SampleAxis(found[samples][0]) if samples in found else "shared"
    return Layout(roles)


def _only_reading(axes: Mapping[str, Mapping[tuple[int, ...], list[int]]], batches: int) -> tuple[int, ...] | None:
    """Return the samples of each batch, if exactly one reading of these axes is possible.

    Where nothing changes from batch to batch, the extent must also come first in every part. An extent that
    changes may count the samples, or be the length that they are padded to.
    """
    every = {extent for found in axes.values() for extent in found}
    ones = (1,) * batches
    if not all(0 in found.get(ones, ()) for found in axes.values()):
        every.discard(ones)  # an extent of 1 is no sample axis, unless it comes first everywhere
    everywhere = [extent for extent in every if all(extent in found for found in axes.values())]
    first = [extent for extent in everywhere if all(found[extent] == [0] for found in axes.values())]
    changing = [extent for extent in every if len(set(extent)) > 1]
    grown = [extent for extent in changing if all(extent in found or _is_steady(found) for found in axes.values())]
    possible = {*everywhere, *grown}
    if len(possible) != 1 or (possible.isdisjoint(changing) and not first):
        return None
    (samples,) = possible
    return None if any(len(found.get(samples, ())) > 1 for found in axes.values()) else samples


def _is_of_numbers(node: Any) -> bool:
    """Return whether a part is a list of plain numbers: image sizes, as likely as one number for each sample."""
    return is_plain_sequence(node) and any(isinstance(thing, Number) for thing in node)


def _parts(path: str, node: Any, *, top: bool = False) -> Iterator[tuple[str, Any, Role | None]]:
    """Yield path, value and role of each part; the role of tensors, arrays and lists of constants is open."""
    listed = is_plain_sequence(node)
    if extents(node) and (not listed or (not top and node and all(map(is_constant, node)))):
        yield path, node, None
    elif is_constant(node):
        yield path, node, "constant"
    else:
        children = open_container(node)
        if children is None:
            raise unknown_type(path, node)
        yield path, node, "fields"
        for name, child in children:
            yield from _parts(path + name, child)


def _axes(shapes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Return the axes of a part by their extents in all batches."""
    found: dict[tuple[int, ...], list[int]] = {}
    for axis, extent in enumerate(zip(*shapes)):
        found.setdefault(extent, []).append(axis)
    return found


def _is_steady(axes: Mapping[tuple[int, ...], Any]) -> bool:
    return all(len(set(extent)) == 1 for extent in axes)


def _ambiguous(leaves: Mapping[str, Any]) -> LayoutError:
    parts = ", ".join(f"{path} {extents(node)}" for path, node in list(leaves.items())[:4]) or "none with a length"
    return uncuttable(f"it comes ready-made and its parts ({parts}) allow for no reading or for several")
