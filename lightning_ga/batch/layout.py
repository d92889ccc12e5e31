"""Read where the samples of a batch lie, from batches whose samples are known: nothing is guessed.

The same samples are collated as 3 and as 4: an axis that grows from 3 to 4 is the sample axis; a part
that stays the same is shared by all samples; a part that changes otherwise is packed, and is not cut.
So a vector for all samples that happens to be as long as the batch is never read as one entry for each
sample, nor are sequences with time first cut along time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container, same_values
from lightning_ga.batch.take import take
from lightning_ga.errors import UserError

FEW, MANY, MOST = 3, 4, 9  # samples of the batches that are compared
WAY_OUT = "define split_batch(self, batch, sizes) on the LightningModule"


class LayoutError(UserError):
    """A batch whose samples cannot be separated."""


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """A part with entries for each sample of a loader."""

    axis: int = 0  # of the samples; 0 for lists and registered types
    per: int = 1  # entries for each sample, neighbours of one another: several where a collate function joins crops
    loader: int = 0  # which of several


@dataclass(frozen=True, slots=True)
class SampleCount:
    """A number that counts the samples of a loader."""

    loader: int = 0


Role = SampleAxis | SampleCount | Literal["shared", "fields", "constant"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples lie in the batches of a loader.

    A batch of several loaders, with 8 and 24 samples, counts as 8 of one and three: so micro-batches keep
    the batch's proportions, and means over either part keep their weights.
    """

    roles: Mapping[str, Role]  # by the path of each part

    def sizes(self, batch: Any) -> dict[int, int]:
        """Return the samples of a batch from each loader that has any in it.

        Raises:
            LayoutError: If its parts disagree, or one of them was not there when the layout was read.
        """
        found: dict[int, tuple[int, str]] = {}
        for loader, here, path in self._counts("batch", batch):
            there, first = found.setdefault(loader, (here, path))
            if here != there:
                raise uncuttable(f"{first} holds {there} of them and {path} {here}")
        return {loader: samples for loader, (samples, _) in found.items()}

    def samples(self, batch: Any) -> int:
        """Return the samples of a batch; of several loaders with different numbers, the greatest common divisor."""
        return self.whole(batch).stop

    def whole(self, batch: Any) -> "Slice":
        """Return the slice that holds all samples of a batch."""
        sizes = self.sizes(batch)
        if not sizes:
            raise uncuttable("nothing in it grows with them")
        return Slice(0, gcd(*sizes.values()), sizes)

    def _counts(self, path: str, node: Any) -> Iterator[tuple[int, int, str]]:
        """Yield loader, number of samples and path of each part with entries for each sample."""
        role = self.roles.get(path)
        if node is None:
            return
        if isinstance(role, SampleAxis):
            shape = extents(node) or ()
            if len(shape) <= role.axis or shape[role.axis] % role.per:
                raise _changed(path, node)
            yield role.loader, shape[role.axis] // role.per, path
        elif role == "fields":
            children = open_container(node) if extents(node) is None or is_plain_sequence(node) else None
            if children is None:
                raise _changed(path, node)
            for name, child in children:
                yield from self._counts(path + name, child)
        elif role is None or (role == "constant" and not is_constant(node)):
            raise _changed(path, node)


@dataclass(frozen=True, slots=True)
class Slice:
    """The samples ``start`` to ``stop - 1`` of a batch to which each loader gave as many as ``sizes`` says."""

    start: int
    stop: int
    sizes: Mapping[int, int]

    def of_loader(self, loader: int) -> tuple[int, int]:
        """Return the first of a loader's samples in the slice, and one after the last."""
        each = self.sizes[loader] // max(1, gcd(*self.sizes.values()))
        return self.start * each, self.stop * each

    def rows(self, role: SampleAxis) -> tuple[int, int]:
        """Return the first entry of a part, and one after the last."""
        start, stop = self.of_loader(role.loader)
        return start * role.per, stop * role.per


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
    """Read the layout of a loader's batches from small batches of its samples.

    Raises:
        LayoutError: If the samples cannot be separated, with the part and the way out.
    """
    roles = _joined([_read_loader(samples, loader) for loader in range(samples.loaders)])
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


def _joined(every: Sequence[Mapping[str, Role]]) -> dict[str, Role]:
    """Join the roles of several loaders, whose samples grew in number one loader at a time."""
    roles: dict[str, Role] = {}
    for found in every:
        for path, role in found.items():
            if isinstance(role, (SampleAxis, SampleCount)):
                if isinstance(roles.get(path), (SampleAxis, SampleCount)):
                    raise uncuttable(f"{path} holds samples of several loaders")
                roles[path] = role
            else:
                roles.setdefault(path, role)
    return roles


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
            raise uncuttable(f"{path} changes its shape in a way of its own")
        changed = [axis for axis, extent in enumerate(small) if extent != large[axis]]
        if not changed and is_plain_sequence(few):
            self._open(path, few, again, many)
            return
        if not changed:
            if same_values(few, again) and not same_values(few, many):
                raise uncuttable(f"{path} changes with the number of samples, though its shape does not")
            self.roles[path] = "shared"
            return
        axis = changed[0]
        per, left = divmod(small[axis], FEW)
        if len(changed) > 1 or left or not per or large[axis] != self.larger * per:
            raise uncuttable(f"{path} goes from the shape {small} to {large} when 3 samples become {self.larger}")
        self.roles[path] = role = SampleAxis(axis, per, self.loader)
        self._check(path, few, again, many, role)

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
        if type(few) is type(many) and None not in children:
            names = [[name for name, _ in opened or ()] for opened in children]
            if names[0] != names[1] or names[0] != names[2]:
                raise uncuttable(f"{path} has other fields when 3 samples become {self.larger}")
            self.roles[path] = "fields"
            for (name, one), (_, two), (_, three) in zip(*(opened or () for opened in children)):
                self.compare(path + name, one, two, three)
        elif same_values(few, many):
            self.roles[path] = "shared"
        else:
            raise unknown_type(path, few)


def uncuttable(why: str) -> LayoutError:
    """Return the error of a batch that cannot be cut, with the way out."""
    return LayoutError(f"The batch cannot be cut into samples, as {why}: {WAY_OUT}.")


def _changed(path: str, node: Any) -> LayoutError:
    shape = extents(node)
    now = f" and the shape {shape}" if shape is not None and not is_plain_sequence(node) else ""
    kind = f"now {type(node).__name__}{now}"
    return uncuttable(f"{path} is of another kind than in the batches that were read before ({kind})")


def unknown_type(path: str, node: Any) -> LayoutError:
    """Return the error of a value of a type that is not known."""
    name = type(node).__name__
    return LayoutError(
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {WAY_OUT}."
    )
