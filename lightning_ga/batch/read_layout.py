"""Read where the samples of a batch lie: nothing is guessed.

If samples are known, the same samples are collated as 3 and as 4: an axis that grows from 3 to 4 is the sample axis; a
part that stays the same is shared by all samples; a part that changes otherwise is packed, and is not cut. So a
vector that happens to be as long as the batch is not mistaken for samples, and no sequence is cut along time.

Of ready-made batches, samples lie on the first axis of every part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from lightning_ga.batch.layout import (
    HookLayout,
    Layout,
    Role,
    SampleAxis,
    SampleCount,
    length_of_first,
    uncuttable,
    unknown_type,
)
from lightning_ga.batch.pytree import (
    extents,
    find_splitter,
    is_constant,
    is_plain_sequence,
    open_container,
    same_values,
    take,
)

BASE = 3  # samples of the batches that are compared
ONE_MORE = 4
FAR_MORE = 9


@dataclass(frozen=True, slots=True)
class Comparison:
    """A few different samples of one or several loaders.

    ``batch`` makes a batch as the loaders do. Its arguments: the number of samples from each loader, which samples to
    repeat in turn, and a seed of the random numbers that the collate function draws.
    """

    batch: Callable[[Sequence[int], Sequence[int], int], Any]
    loaders: int
    kinds: int  # different samples of each


def read_layout(samples: Comparison) -> Layout:
    """Read the layout of a loader's batches from small batches of its samples; refuse those that cannot be cut."""
    roles: dict[str, Role] = {}
    for loader in range(samples.loaders):
        of_loader: dict[str, Role] = {}
        for kind in range(samples.kinds):
            _agree(of_loader, _compared(samples, loader, [kind]))
        _agree(of_loader, _compared(samples, loader, range(samples.kinds), widely=True))
        _join(roles, of_loader)
    if {role.loader for role in roles.values() if isinstance(role, SampleAxis)} != set(range(samples.loaders)):
        raise uncuttable("nothing in it grows with them")
    return Layout(roles)


def read_hook_layout(hook: Any, samples: Comparison) -> HookLayout:
    """Read how many rows of a batch's first tensor each sample has; refuse a number that is not the same for all."""
    lengths = [length_of_first(samples.batch([count], range(samples.kinds), 0)) for count in (BASE, ONE_MORE)]
    rows = lengths[0] // BASE
    if samples.loaders > 1 or rows == 0 or lengths != [BASE * rows, ONE_MORE * rows]:
        raise uncuttable(f"its first tensor goes from {lengths[0]} to {lengths[1]} rows when 3 samples become 4")
    return HookLayout(hook, rows)


def _compared(samples: Comparison, loader: int, kinds: Sequence[int], *, widely: bool = False) -> dict[str, Role]:
    """Return the roles as 3 samples become 4; ``widely``: also 9, so that rounding cannot hide growth."""
    roles: dict[str, Role] = {}
    few = [BASE] * samples.loaders
    once, twice = (samples.batch(few, kinds, seed) for seed in (0, 1))
    for larger in (ONE_MORE, FAR_MORE) if widely else (ONE_MORE,):
        many = [larger if position == loader else BASE for position in range(samples.loaders)]
        reading = _Reading(loader, larger, checks=len(kinds) == 1)
        reading.compare("batch", once, twice, samples.batch(many, kinds, 0))
        _agree(roles, reading.roles)
    return roles


def _agree(known: dict[str, Role], further: Mapping[str, Role]) -> None:
    """Add the roles that batches of other samples show; a part must have the same role in all."""
    for path, role in further.items():
        if known.setdefault(path, role) != role:
            raise uncuttable(f"{path} has different numbers of entries for different samples")


def _join(known: dict[str, Role], further: Mapping[str, Role]) -> None:
    """Add the roles that another loader shows when it gives more samples; a part has samples of one loader only."""
    for path, role in further.items():
        if not isinstance(role, (SampleAxis, SampleCount)):
            known.setdefault(path, role)
        elif isinstance(known.get(path), (SampleAxis, SampleCount)):
            raise uncuttable(f"{path} contains samples of several loaders")
        else:
            known[path] = role


@dataclass(slots=True)
class _Reading:
    """Compares a batch of 3 samples with a larger one, for which one loader gives more samples."""

    loader: int
    larger: int
    checks: bool  # whether all samples are the same, so that values can be compared too
    roles: dict[str, Role] = field(default_factory=dict)

    def compare(self, path: str, few: Any, repeat: Any, many: Any) -> None:
        """Find the role of a part: that of 3 samples, of the same collated once more, and of the larger number."""
        if few is None and many is None:
            return
        small = extents(few)
        twice = extents(repeat)
        large = extents(many)
        if small is None or twice is None or large is None or type(few) is not type(many):
            if is_constant(few) and is_constant(many):
                self.roles[path] = self._role_of_number(path, few, repeat, many)
            else:
                self._open(path, few, repeat, many)
        elif small != twice or len(small) != len(large):
            raise uncuttable(f"{path} changes its shape in a way of its own")
        elif small != large:
            self.roles[path] = role = self._role_of_growing(path, small, large)
            self._check(path, few, repeat, many, role)
        elif is_plain_sequence(few):
            self._open(path, few, repeat, many)
        elif same_values(few, repeat) and not same_values(few, many):
            raise uncuttable(f"{path} changes with the number of samples, though its shape does not")
        else:
            self.roles[path] = "shared"

    def _role_of_growing(self, path: str, small: tuple[int, ...], large: tuple[int, ...]) -> SampleAxis:
        axis, *others = [axis for axis, extent in enumerate(small) if extent != large[axis]]
        if others or (small[axis], large[axis]) != (BASE, self.larger):
            raise uncuttable(f"{path} goes from the shape {small} to {large} when 3 samples become {self.larger}")
        return SampleAxis(axis, self.loader)

    def _check(self, path: str, few: Any, repeat: Any, many: Any, role: SampleAxis) -> None:
        """Check that any 3 of equal samples are the same; otherwise an entry depends on its position in the batch."""
        if not self.checks or find_splitter(few) is not None or not same_values(few, repeat):
            return  # a type may say how it is cut, and a collate function may draw random numbers
        for start in (0, self.larger - BASE):
            if not same_values(take(many, role.axis, start, start + BASE), few):
                raise uncuttable(f"{path} depends on where in the batch a sample is")

    def _role_of_number(self, path: str, few: Any, repeat: Any, many: Any) -> Role:
        if same_values(few, many) or not same_values(few, repeat):
            return "constant"
        if few == BASE and many == self.larger:
            return SampleCount(self.loader)
        raise uncuttable(f"{path} goes from {few} to {many} when 3 samples become {self.larger}")

    def _open(self, path: str, few: Any, repeat: Any, many: Any) -> None:
        children = [open_container(node) for node in (few, repeat, many)]
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


def read_ready_made(batch: Any) -> Layout:
    """Read the layout of a batch that comes ready-made: samples lie on the first axis of all its parts."""
    parts = list(_parts("batch", batch, top=True))
    leaves = {path: node for path, node, role in parts if role is None}
    first = {shape[0] for shape in map(extents, leaves.values()) if shape}
    # A list of numbers may be an image size, as likely as one number for each sample.
    numbers = (node for node in leaves.values() if is_plain_sequence(node))
    if len(first) != 1 or any(isinstance(value, Number) for node in numbers for value in node):
        shapes = ", ".join(f"{path} {extents(node)}" for path, node in list(leaves.items())[:4])
        raise uncuttable(
            f"it comes ready-made and its parts ({shapes or 'none with a length'}) do not all have the same length "
            "along their first axis"
        )
    return Layout({path: SampleAxis() if role is None else role for path, _, role in parts})


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
