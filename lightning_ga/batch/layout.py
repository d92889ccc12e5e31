"""Read where the samples of a batch lie, from batches whose samples are known: nothing is guessed.

The same samples are collated as 3 and as 4: an axis that grows from 3 to 4 is the sample axis; a part
that stays the same is shared by all samples; a part that changes otherwise is packed, and is not cut.
So a vector for all samples that happens to be as long as the batch is never read as one entry for each
sample, nor are sequences with time first cut along time. Batches that come ready-made, without samples
at hand, are read only where a single reading is possible (``read_ready_made``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from numbers import Number
from typing import Any, Literal

import torch

from lightning_ga.batch.pytree import (
    extents,
    is_constant,
    is_plain_sequence,
    open_container,
    same_values,
)
from lightning_ga.batch.take import take
from lightning_ga.errors import UserError

FEW, MANY, MOST = 3, 4, 9  # samples of the batches that are compared
WAY_OUT = "define split_batch(self, batch, sizes) on the LightningModule"


class LayoutError(UserError):
    """A batch whose samples cannot be separated."""


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """A part with entries for each sample.

    Attributes:
        axis: The axis of the samples; 0 for lists and registered types.
        per: Entries for each sample, neighbours of one another: more than one where a collate function
            joins several crops of every sample.
        loader: Which of several loaders the samples come from.
    """

    axis: int = 0
    per: int = 1
    loader: int = 0


@dataclass(frozen=True, slots=True)
class SampleCount:
    """A number that counts the samples.

    Attributes:
        loader: Which of several loaders the samples come from.
    """

    loader: int = 0


Role = SampleAxis | SampleCount | Literal["shared", "fields", "constant"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples lie in the batches of a loader.

    A batch of several loaders, with 8 and 24 samples, counts as 8 of one and three: so micro-batches keep
    the batch's proportions, and means over either part keep their weights.

    Attributes:
        roles: The role of each part, by its path.
        loaders: How many loaders the batch comes from.
    """

    roles: Mapping[str, Role]
    loaders: int = 1

    def sizes(self, batch: Any) -> dict[int, int]:
        """Return the samples of a batch from each loader that has any in it.

        Raises:
            LayoutError: If its parts disagree, or one of them was not there when the layout was read.
        """
        found: dict[int, dict[int, str]] = {}
        self._count("batch", batch, found)
        for counts in found.values():
            if len(counts) > 1:
                (one, there), (other, here) = list(counts.items())[:2]
                raise LayoutError(
                    f"The batch cannot be cut into samples, as {there} holds {one} of them and {here} {other}: "
                    f"{WAY_OUT}."
                )
        return {loader: next(iter(counts)) for loader, counts in found.items()}

    def samples(self, batch: Any) -> int:
        """Return the samples of a batch; of several loaders with different numbers, the greatest common divisor.

        Raises:
            LayoutError: If the number cannot be read.
        """
        sizes = self.sizes(batch)
        if not sizes:
            raise LayoutError(f"The batch cannot be cut into samples, as nothing in it grows with them: {WAY_OUT}.")
        return gcd(*sizes.values())

    def _count(self, path: str, node: Any, found: dict[int, dict[int, str]]) -> None:
        role = self.roles.get(path)
        if node is None:
            return
        if isinstance(role, SampleAxis):
            shape = extents(node)
            extent = shape[role.axis] if shape is not None and role.axis < len(shape) else None
            if extent is None or extent % role.per:
                raise LayoutError(_changed(path, node))
            found.setdefault(role.loader, {}).setdefault(extent // role.per, path)
        elif role == "fields":
            children = None if extents(node) is not None and not is_plain_sequence(node) else open_container(node)
            if children is None:
                raise LayoutError(_changed(path, node))
            for name, child in children:
                self._count(path + name, child, found)
        elif role is None or (role == "constant" and not is_constant(node)):
            raise LayoutError(_changed(path, node))


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of neighbouring samples of a batch.

    Attributes:
        start: The first.
        stop: One after the last.
        samples: Samples of the batch.
        sizes: Samples from each loader.
    """

    start: int
    stop: int
    samples: int
    sizes: Mapping[int, int]

    def rows(self, role: SampleAxis) -> tuple[int, int]:
        """Return the first entry of a part, and one after the last."""
        per = role.per * (self.sizes[role.loader] // self.samples) if self.samples else 0
        return self.start * per, self.stop * per


class Samples:
    """Makes batches of real samples of a few kinds, from which a layout can be read.

    Attributes:
        loaders: How many loaders a batch comes from.
        kinds: How many different samples each loader has.
    """

    loaders: int = 1
    kinds: int = 1

    def batch(self, counts: Sequence[int], kinds: Sequence[int], seed: int) -> Any:
        """Return a batch as the loaders make it.

        Args:
            counts: Samples from each loader.
            kinds: Which samples it holds, in turn.
            seed: Seed of the random numbers that the collate function draws.
        """
        raise NotImplementedError


def read_layout(samples: Samples) -> Layout:
    """Read the layout of a loader's batches from small batches of its samples.

    Args:
        samples: Makes the batches.

    Raises:
        LayoutError: If the samples cannot be separated, with the part and the way out.
    """
    every = [_read_loader(samples, loader) for loader in range(samples.loaders)]
    return _checked(Layout(_joined(every), samples.loaders))


def _read_loader(samples: Samples, loader: int) -> Mapping[str, Role]:
    """Return the roles of the parts with samples of one loader, read from batches of each kind of sample and of all."""
    found: dict[int, dict[str, Role]] = {}
    failure: Exception | None = None
    for kind in range(samples.kinds):
        try:
            found[kind] = _compared(samples, loader, [kind])
        except LayoutError:
            raise
        except Exception as error:  # a sample that cannot be collated by itself
            failure = error
    whole = [kind for kind, roles in found.items() if any(isinstance(role, SampleAxis) for role in roles.values())]
    if not found and failure is not None:
        raise failure
    roles: dict[str, Role] = {}
    for kind in whole or found:
        _agree(roles, found[kind])
    _agree(roles, _compared(samples, loader, whole or list(found), widely=True))
    return roles


def _compared(samples: Samples, loader: int, kinds: Sequence[int], *, widely: bool = False) -> dict[str, Role]:
    """Return the roles as 3 samples become 4; ``widely``: also 9, where rounding cannot hide that something grows."""
    roles: dict[str, Role] = {}
    few = [FEW] * samples.loaders
    once, twice = (samples.batch(few, kinds, seed) for seed in (0, 1))
    for larger in (MANY, MOST) if widely else (MANY,):
        many = [larger if position == loader else FEW for position in range(samples.loaders)]
        reading = _Reading(loader, larger, checks=len(kinds) == 1)
        reading.compare("batch", once, twice, samples.batch(many, kinds, 0))
        _agree(roles, reading.roles)
    return roles


def _agree(known: dict[str, Role], further: Mapping[str, Role]) -> None:
    """Add the roles that batches of other samples show; a part must have the same role in all."""
    for path, role in further.items():
        if known.setdefault(path, role) != role:
            raise LayoutError(_packed(path, "holds different numbers of entries for different samples"))


def _joined(every: Sequence[Mapping[str, Role]]) -> dict[str, Role]:
    """Join the roles of several loaders, whose samples grew in number one loader at a time."""
    roles: dict[str, Role] = {}
    for found in every:
        for path, role in found.items():
            if isinstance(role, (SampleAxis, SampleCount)):
                if isinstance(roles.get(path), (SampleAxis, SampleCount)):
                    raise LayoutError(_packed(path, "holds samples of several loaders"))
                roles[path] = role
            else:
                roles.setdefault(path, role)
    return roles


def _checked(layout: Layout) -> Layout:
    axes = {path: role for path, role in layout.roles.items() if isinstance(role, SampleAxis)}
    if {role.loader for role in axes.values()} != set(range(layout.loaders)):
        raise LayoutError(f"The batch cannot be cut into samples, as nothing in it grows with them: {WAY_OUT}.")
    for path, role in axes.items():
        others = {other.per for other in axes.values() if other.loader == role.loader}
        if len(others) > 1 and role.per == max(others):
            # Their number may differ between samples: rows of two parts would then belong to different samples.
            raise LayoutError(_packed(path, f"holds {role.per} entries for each sample, and other parts hold fewer"))
    return layout


@dataclass(slots=True)
class _Reading:
    """Compares batches of 3 and of more samples.

    Attributes:
        loader: The loader whose samples grow in number.
        larger: The larger number.
        checks: Whether all samples are the same, so that values can be compared too.
        roles: The roles found.
    """

    loader: int
    larger: int
    checks: bool
    roles: dict[str, Role] = field(default_factory=dict)

    def compare(self, path: str, few: Any, again: Any, many: Any) -> None:
        """Find the role of a part.

        Args:
            path: The part's path.
            few: The part of 3 samples.
            again: The part of the same samples, collated once more.
            many: The part of the larger number of samples.
        """
        if few is None and many is None:
            return
        shapes = extents(few), extents(again), extents(many)
        if None not in shapes and type(few) is type(many):
            self._compare_shapes(path, few, again, many, *shapes)  # type: ignore[arg-type]
        elif is_constant(few) and is_constant(many):
            self.roles[path] = self._role_of_number(path, few, again, many)
        else:
            self._open(path, few, again, many)

    def _compare_shapes(self, path: str, few: Any, again: Any, many: Any, *shapes: tuple[int, ...]) -> None:
        small, twice, large = shapes
        if small != twice or len(small) != len(large):
            raise LayoutError(_packed(path, "changes its shape in a way of its own"))
        changed = [axis for axis, extent in enumerate(small) if extent != large[axis]]
        if not changed and is_plain_sequence(few):
            self._open(path, few, again, many)
            return
        if not changed:
            if same_values(few, again) and not same_values(few, many):
                raise LayoutError(_packed(path, "changes with the number of samples, though its shape does not"))
            self.roles[path] = "shared"
            return
        axis = changed[0]
        per, left = divmod(small[axis], FEW)
        if len(changed) > 1 or left or not per or large[axis] != self.larger * per:
            raise LayoutError(
                _packed(path, f"goes from the shape {small} to {large} when 3 samples become {self.larger}")
            )
        self.roles[path] = role = SampleAxis(axis, per, self.loader)
        self._check(path, few, again, many, role)

    def _check(self, path: str, few: Any, again: Any, many: Any, role: SampleAxis) -> None:
        """Check that any 3 of equal samples are the same; otherwise an entry depends on its position in the batch."""
        if not self.checks:
            return
        if not same_values(few, again):  # the collate function draws random numbers
            if role.per > 1:
                raise LayoutError(_packed(path, f"holds {role.per} entries for each sample that change every time"))
            return
        for start in (0, self.larger - FEW):
            if not same_values(take(many, role.axis, start * role.per, (start + FEW) * role.per), few):
                raise LayoutError(_packed(path, "depends on where in the batch a sample is"))

    def _role_of_number(self, path: str, few: Any, again: Any, many: Any) -> Role:
        if same_values(few, many) or not same_values(few, again):
            return "constant"
        if _number(few) == FEW and _number(many) == self.larger:
            return SampleCount(self.loader)
        raise LayoutError(_packed(path, f"goes from {few} to {many} when 3 samples become {self.larger}"))

    def _open(self, path: str, few: Any, again: Any, many: Any) -> None:
        children = [open_container(node) for node in (few, again, many)]
        if type(few) is type(many) and None not in children:
            names = [[name for name, _ in opened or ()] for opened in children]
            if names[0] != names[1] or names[0] != names[2]:
                raise LayoutError(_packed(path, f"has other fields when 3 samples become {self.larger}"))
            self.roles[path] = "fields"
            for (name, one), (_, two), (_, three) in zip(*(opened or () for opened in children)):
                self.compare(path + name, one, two, three)
        elif same_values(few, many):
            self.roles[path] = "shared"
        else:
            raise LayoutError(_unknown_type(path, few))


def read_ready_made(batches: Sequence[Any]) -> Layout:
    """Read the layout of batches that come ready-made, without samples at hand.

    The number of samples is an extent that every part has, along one axis each. Where a part lacks it,
    batches of different sizes are compared: a part that stays the same is shared.

    Args:
        batches: Batches of one loader, of different sizes if there are any.

    Raises:
        LayoutError: If more than one reading is possible, or none.

    Examples:
        >>> read_ready_made([[torch.zeros(8, 7), torch.zeros(8)]]).roles["batch[0]"]
        SampleAxis(axis=0, per=1, loader=0)
    """
    if not batches:
        raise LayoutError(f"The batch cannot be cut into samples, as none was looked at before training: {WAY_OUT}.")
    parts = [list(_parts("batch", batch, top=True)) for batch in batches]
    leaves = [{path: node for path, node, role in found if role is None} for found in parts]
    if not leaves[0] or any(set(found) != set(leaves[0]) for found in leaves):
        raise LayoutError(_ambiguous(leaves[0]))
    axes = {path: _axes([extents(found[path]) or () for found in leaves]) for path in leaves[0]}
    samples = _only_reading(axes, len(batches))
    if samples is None or any(_is_of_numbers(node) and samples in axes[path] for path, node in leaves[0].items()):
        raise LayoutError(_ambiguous(leaves[0]))
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
            raise LayoutError(_unknown_type(path, node))
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


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, Number) and not isinstance(value, (bool, complex)) else None  # type: ignore[arg-type]


def _packed(path: str, what: str) -> str:
    return f"The batch cannot be cut into samples, as {path} {what}: {WAY_OUT}."


def _changed(path: str, node: Any) -> str:
    shape = extents(node)
    now = f" and the shape {shape}" if shape is not None and not is_plain_sequence(node) else ""
    return _packed(
        path, f"is of another kind than in the batches that were read before (now {type(node).__name__}{now})"
    )


def _ambiguous(leaves: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{path} {extents(node)}" for path, node in list(leaves.items())[:4]) or "none with a length"
    return (
        f"The batch cannot be cut into samples, as it comes ready-made and its parts ({parts}) "
        f"allow for no reading or for several: {WAY_OUT}."
    )


def _unknown_type(path: str, node: Any) -> str:
    name = type(node).__name__
    return (
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {WAY_OUT}."
    )
