"""Read where the samples of a batch lie: nothing is guessed.

If samples are known, the same samples are collated as 3 and as 4: an axis that grows from 3 to 4 is the sample axis; a
part that stays the same is shared by all samples; a part that changes otherwise is packed, and is not cut. So a
vector that happens to be as long as the batch is not mistaken for samples, and no sequence is cut along time.

Of ready-made batches, samples lie on the first axis of every part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
)
from lightning_ga.batch.take import take

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
    larger: Sequence[int] = (ONE_MORE, FAR_MORE)  # samples of the batches that those of 3 are compared with


def read_layout(samples: Comparison) -> Layout:
    """Read the layout of a loader's batches from small batches of its samples; refuse those that cannot be cut."""
    roles: dict[str, Role] = {}
    for loader in range(samples.loaders):
        _join(roles, _roles_of(samples, loader))
    growing = {role.loader for role in roles.values() if isinstance(role, SampleAxis)}
    if len(growing) < samples.loaders:
        raise uncuttable("nothing in it grows with them")
    return Layout(roles)


def read_hook_layout(hook: Any, samples: Comparison) -> HookLayout:
    """Read how many rows of a batch's first tensor each sample has; refuse a number that is not the same for all."""
    every = range(samples.kinds)
    small = length_of_first(samples.batch([BASE], every, 0))
    large = length_of_first(samples.batch([ONE_MORE], every, 0))
    rows = small // BASE
    if samples.loaders > 1 or rows == 0 or (small, large) != (BASE * rows, ONE_MORE * rows):
        raise uncuttable(f"its first tensor goes from {small} to {large} rows when 3 samples become 4")
    return HookLayout(hook, rows)


def _roles_of(samples: Comparison, loader: int) -> dict[str, Role]:
    """Return the roles as 3 samples of a loader become 4; and 9, so that rounding cannot hide growth."""
    roles: dict[str, Role] = {}
    every = range(samples.kinds)
    few = [BASE] * samples.loaders
    equal = [[kind] for kind in every]
    for kinds in [*equal, every]:
        once = samples.batch(few, kinds, 0)
        twice = samples.batch(few, kinds, 1)
        for larger in samples.larger:
            counts = few.copy()
            counts[loader] = larger
            reading = _Reading(loader, larger, roles, are_equal=len(kinds) == 1)
            reading.compare("batch", once, twice, samples.batch(counts, kinds, 0))
    return roles


def _join(known: dict[str, Role], further: Mapping[str, Role]) -> None:
    """Add the roles that another loader shows when it gives more samples; a part has samples of one loader only.

    A part that seemed shared, because the first loader gave no more, may have those of the other.
    """
    for path, role in further.items():
        if not isinstance(role, (SampleAxis, SampleCount)):
            known.setdefault(path, role)
        elif isinstance(known.get(path), (SampleAxis, SampleCount)):
            raise uncuttable(f"{path} contains samples of several loaders")
        else:
            known[path] = role


@dataclass(frozen=True, slots=True)
class _Reading:
    """Compares a batch of 3 samples with a larger one, for which one loader gives more samples."""

    loader: int
    larger: int
    roles: dict[str, Role]  # that batches of any samples have shown
    are_equal: bool  # whether the samples are, so that values can be compared too

    def compare(self, path: str, few: Any, repeat: Any, many: Any) -> None:
        """Find the role of a part: that of 3 samples, of the same collated once more, and of the larger number."""
        if few is None and many is None:
            return
        small = extents(few)
        twice = extents(repeat)
        large = extents(many)
        if small is None or twice is None or large is None or type(few) is not type(many):
            if is_constant(few) and is_constant(many):
                self._add(path, self._role_of_number(path, few, repeat, many))
            else:
                self._open(path, few, repeat, many)
        elif small != twice or len(small) != len(large):
            raise uncuttable(f"{path} changes its shape in a way of its own")
        elif small != large:
            role = self._role_of_growing(path, small, large)
            self._check(path, few, repeat, many, role)
            self._add(path, role)
        elif is_plain_sequence(few):
            self._open(path, few, repeat, many)
        elif same_values(few, repeat) and not same_values(few, many):
            raise uncuttable(f"{path} changes with the number of samples, though its shape does not")
        else:
            self._add(path, "shared")

    def _add(self, path: str, role: Role) -> None:
        if self.roles.setdefault(path, role) != role:
            raise uncuttable(f"{path} has different numbers of entries for different samples")

    def _role_of_growing(self, path: str, small: tuple[int, ...], large: tuple[int, ...]) -> SampleAxis:
        axis, *others = [axis for axis, extent in enumerate(small) if extent != large[axis]]
        if others or (small[axis], large[axis]) != (BASE, self.larger):
            raise uncuttable(f"{path} goes from the shape {small} to {large} when 3 samples become {self.larger}")
        return SampleAxis(axis, self.loader)

    def _check(self, path: str, few: Any, repeat: Any, many: Any, role: SampleAxis) -> None:
        """Check that any 3 of equal samples are the same; otherwise an entry depends on its position in the batch."""
        if not self.are_equal or find_splitter(few) is not None or not same_values(few, repeat):
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
        small = open_container(few)
        twice = open_container(repeat)
        large = open_container(many)
        if small is None or twice is None or large is None or type(few) is not type(many):
            if not same_values(few, many):
                raise unknown_type(path, few)
            self._add(path, "shared")
            return
        repeats = dict(twice)
        others = dict(large)
        if not [name for name, _ in small] == [*repeats] == [*others]:
            raise uncuttable(f"{path} has other fields when 3 samples become {self.larger}")
        self._add(path, "fields")
        for name, child in small:
            self.compare(path + name, child, repeats[name], others[name])


def read_ready_made(batch: Any) -> Layout:
    """Read the layout of a batch that comes ready-made: samples lie on the first axis of all its parts."""
    roles: dict[str, Role] = {}
    shapes: dict[str, Any] = {}  # of parts that may contain samples
    has_numbers = False
    for path, node, role in _parts("batch", batch, top=True):
        roles[path] = role or SampleAxis()
        if role is None:
            shapes[path] = extents(node)
            # A list of numbers may be an image size, as likely as one number for each sample.
            has_numbers |= is_plain_sequence(node) and any(isinstance(value, Number) for value in node)
    lengths = {shape[0] for shape in shapes.values()}
    parts = ", ".join(f"{path} {shape}" for path, shape in [*shapes.items()][:4])
    if not parts:
        raise uncuttable("it comes ready-made, and no part of it has a length")
    if has_numbers:
        raise uncuttable(
            f"it comes ready-made, and a list of numbers in it ({parts}) may belong to all samples or each"
        )
    if len(lengths) > 1:
        raise uncuttable(
            f"it comes ready-made and its parts ({parts}) do not all have the same length along their first axis"
        )
    return Layout(roles)


def _parts(path: str, node: Any, *, top: bool = False) -> Iterator[tuple[str, Any, Role | None]]:
    """Yield path, value and role of each part; the role of tensors and arrays is open, and that of lists of constants.

    A list at the ``top`` is the batch itself.
    """
    is_list = is_plain_sequence(node)
    is_list_of_constants = is_list and not top and len(node) > 0 and all(map(is_constant, node))
    if extents(node) and (not is_list or is_list_of_constants):
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
