"""Read where the samples of a batch lie: nothing is guessed.

If samples are known, the same samples are collated as 3 and as 4: an axis that grows from 3 to 4 is the sample axis; a
part that stays the same is shared by all samples; a part that changes otherwise is packed, and is not cut. So no vector
that happens to be as long as the batch is taken for samples, and no sequence is cut along time.

Of ready-made batches the number of samples is an extent that every part has, along one axis each. If a part lacks it,
batches of different sizes are compared. They are read only if a single reading is possible.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from lightning_ga.batch.layout import Layout, LayoutError, Role, SampleAxis, SampleCount, uncuttable, unknown_type
from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container, same_values, take

FEW, MANY, MOST = 3, 4, 9  # samples of the batches that are compared


@dataclass(frozen=True, slots=True)
class Samples:
    """A few different samples of one or several loaders.

    ``batch`` makes a batch as the loaders do. It is called with the number of samples from each loader, those that
    it holds in turn, and a seed of the random numbers that the collate function draws.
    """

    batch: Callable[[Sequence[int], Sequence[int], int], Any]
    loaders: int
    kinds: int  # different samples of each


def read_layout(samples: Samples) -> Layout:
    """Read the layout of a loader's batches from small batches of its samples; refuse those that cannot be cut."""
    roles: dict[str, Role] = {}
    for loader in range(samples.loaders):
        _join(roles, _read_loader(samples, loader))
    _check_axes(roles, samples.loaders)
    return Layout(roles)


def _read_loader(samples: Samples, loader: int) -> Mapping[str, Role]:
    """Return the roles of the parts with samples of one loader, read from batches of each kind of sample and of all."""
    found: dict[int, dict[str, Role]] = {}
    for kind in range(samples.kinds):
        try:
            found[kind] = _compared(samples, loader, [kind])
        except LayoutError:
            raise
        except Exception:  # a sample that cannot be collated by itself
            if not found and kind == samples.kinds - 1:
                raise
    whole = [kind for kind, roles in found.items() if any(isinstance(role, SampleAxis) for role in roles.values())]
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
            raise uncuttable(f"{path} holds different numbers of entries for different samples")


def _join(known: dict[str, Role], further: Mapping[str, Role]) -> None:
    """Add the roles that show where one more loader gives more samples; a part must have samples of one loader."""
    for path, role in further.items():
        if not isinstance(role, (SampleAxis, SampleCount)):
            known.setdefault(path, role)
        elif isinstance(known.get(path), (SampleAxis, SampleCount)):
            raise uncuttable(f"{path} holds samples of several loaders")
        else:
            known[path] = role


def _check_axes(roles: Mapping[str, Role], loaders: int) -> None:
    axes = {path: role for path, role in roles.items() if isinstance(role, SampleAxis)}
    if {role.loader for role in axes.values()} != set(range(loaders)):
        raise uncuttable("nothing in it grows with them")
    for path, role in axes.items():
        others = {other.per for other in axes.values() if other.loader == role.loader}
        if len(others) > 1 and role.per == max(others):
            # Their number may differ between samples: rows of two parts would then belong to different samples.
            raise uncuttable(f"{path} holds {role.per} entries for each sample, and other parts hold fewer")


@dataclass(slots=True)
class _Reading:
    """Compares batches of 3 samples and of a larger number, where one loader gives more than before."""

    loader: int
    larger: int
    checks: bool  # whether all samples are the same, so that values can be compared too
    roles: dict[str, Role] = field(default_factory=dict)

    def compare(self, path: str, few: Any, again: Any, many: Any) -> None:
        """Find the role of a part: that of 3 samples, of the same collated once more, and of the larger number."""
        if few is None and many is None:
            return
        small, twice, large = extents(few), extents(again), extents(many)
        if small is None or twice is None or large is None or type(few) is not type(many):
            if is_constant(few) and is_constant(many):
                self.roles[path] = self._role_of_number(path, few, again, many)
            else:
                self._open(path, few, again, many)
        elif small != twice or len(small) != len(large):
            raise uncuttable(f"{path} changes its shape in a way of its own")
        elif small != large:
            self.roles[path] = role = self._role_of_growing(path, small, large)
            self._check(path, few, again, many, role)
        elif is_plain_sequence(few):
            self._open(path, few, again, many)
        elif same_values(few, again) and not same_values(few, many):
            raise uncuttable(f"{path} changes with the number of samples, though its shape does not")
        else:
            self.roles[path] = "shared"

    def _role_of_growing(self, path: str, small: tuple[int, ...], large: tuple[int, ...]) -> SampleAxis:
        axis, *others = [axis for axis, extent in enumerate(small) if extent != large[axis]]
        per, left = divmod(small[axis], FEW)
        if others or left or not per or large[axis] != self.larger * per:
            raise uncuttable(f"{path} goes from the shape {small} to {large} when 3 samples become {self.larger}")
        return SampleAxis(axis, per, self.loader)

    def _check(self, path: str, few: Any, again: Any, many: Any, role: SampleAxis) -> None:
        """Check that any 3 of equal samples are the same; otherwise an entry depends on its position in the batch."""
        if not self.checks:
            return
        if not same_values(few, again):  # the collate function draws random numbers
            if role.per > 1:
                raise uncuttable(f"{path} holds {role.per} entries for each sample that change every time")
            return
        for start in (0, self.larger - FEW):
            if not same_values(take(many, role.axis, start * role.per, (start + FEW) * role.per), few):
                raise uncuttable(f"{path} depends on where in the batch a sample is")

    def _role_of_number(self, path: str, few: Any, again: Any, many: Any) -> Role:
        if same_values(few, many) or not same_values(few, again):
            return "constant"
        if few == FEW and many == self.larger:
            return SampleCount(self.loader)
        raise uncuttable(f"{path} goes from {few} to {many} when 3 samples become {self.larger}")

    def _open(self, path: str, few: Any, again: Any, many: Any) -> None:
        children = [open_container(node) for node in (few, again, many)]
        if type(few) is not type(many) or None in children:
            if not same_values(few, many):
                raise unknown_type(path, few)
            self.roles[path] = "shared"
            return
        names = [[name for name, _ in opened or ()] for opened in children]
        if not names[0] == names[1] == names[2]:
            raise uncuttable(f"{path} has other fields when 3 samples become {self.larger}")
        self.roles[path] = "fields"
        for (name, one), (_, two), (_, three) in zip(*(opened or () for opened in children)):
            self.compare(path + name, one, two, three)


def read_ready_made(batches: Sequence[Any], decides: Callable[[Layout], bool] | None = None) -> Layout:
    """Read the layout of ready-made batches of one loader, of different sizes if there are any.

    Unless samples can only come first, ``decides`` is asked of each reading: a mask has its padding at the ends of
    samples.

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
    roles: dict[str, Role] = {path: role for path, _, role in parts[0] if role is not None}

    def layout(samples: tuple[int, ...]) -> Layout:
        for path, found in axes.items():
            roles[path] = SampleAxis(found[samples][0]) if samples in found else "shared"
        return Layout({**roles})

    readings = _readings(axes, len(batches), all_of_them=decides is not None)
    is_plain = len(readings) == 1 and all(found.get(readings[0], [0]) == [0] for found in axes.values())
    if not is_plain and decides is not None:
        readings = [each for each in readings if decides(layout(each))]
    (samples,) = readings if len(readings) == 1 else (None,)
    if samples is None or any(_is_of_numbers(node) and samples in axes[path] for path, node in leaves[0].items()):
        shapes = ", ".join(f"{path} {extents(node)}" for path, node in list(leaves[0].items())[:4])
        shapes = shapes or "none with a length"
        raise uncuttable(f"it comes ready-made and its parts ({shapes}) allow for no reading or for several")
    return layout(samples)


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


def _readings(
    axes: Mapping[str, Mapping[tuple[int, ...], list[int]]], batches: int, *, all_of_them: bool
) -> list[tuple[int, ...]]:
    """Return the samples of each batch, in all readings of these axes that are possible, or if one alone is.

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
    if (len(possible) != 1 and not all_of_them) or (possible.isdisjoint(changing) and not first):
        return []
    return [samples for samples in possible if all(len(found.get(samples, ())) <= 1 for found in axes.values())]


def _is_steady(axes: Mapping[tuple[int, ...], Any]) -> bool:
    return all(len(set(extent)) == 1 for extent in axes)


def _is_of_numbers(node: Any) -> bool:
    """Return whether a part is a list of plain numbers: image sizes, as likely as one number for each sample."""
    return is_plain_sequence(node) and any(isinstance(thing, Number) for thing in node)
