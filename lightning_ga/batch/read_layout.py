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
    LayoutError,
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
    layout = Layout(roles)
    every = range(samples.kinds)
    few = [BASE] * samples.loaders
    equal = [[kind] for kind in every]
    for kinds in [*equal, every]:
        once = samples.batch(few, kinds, 0)
        again = samples.batch(few, kinds, 1)
        for larger in samples.larger:
            counts = few.copy()
            counts[loader] = larger
            many = samples.batch(counts, kinds, 0)
            for small in (once, again):
                for path, role in _roles("batch", small, many, loader, larger):
                    if roles.setdefault(path, role) != role:
                        raise uncuttable(f"{path} has different numbers of entries for different samples")
            for start in (0, larger - BASE):
                part = layout.part_of(many, {loader: (start, start + BASE)})
                _check(layout, once, again, part, are_equal=len(kinds) == 1)
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


def _roles(path: str, few: Any, many: Any, loader: int, larger: int) -> Iterator[tuple[str, Role]]:
    """Yield the role of each part by its shape in a batch of 3 samples, and in one with more of a loader."""
    if few is None and many is None:
        return
    small = extents(few)
    large = extents(many)
    if small is not None and small != large:
        yield path, SampleAxis(_growing_axis(path, small, large, larger), loader)
    elif small is not None and not is_plain_sequence(few):
        yield path, "shared"
    elif is_constant(few) and is_constant(many):
        is_count = few == BASE and many == larger
        if is_count:
            yield path, SampleCount(loader)
        else:
            yield path, "constant"
    else:
        children = open_container(few)
        others = open_container(many)
        if children is None or others is None or type(few) is not type(many):
            if not same_values(few, many):
                raise unknown_type(path, few)
            yield path, "shared"
            return
        if [name for name, _ in children] != [name for name, _ in others]:
            raise uncuttable(f"{path} has other fields when 3 samples become {larger}")
        yield path, "fields"
        for (name, child), (_, other) in zip(children, others):
            yield from _roles(path + name, child, other, loader, larger)


def _growing_axis(path: str, small: tuple[int, ...], large: tuple[int, ...] | None, larger: int) -> int:
    for axis, extent in enumerate(small):
        if extent == BASE and large == (*small[:axis], larger, *small[axis + 1 :]):
            return axis
    raise uncuttable(f"{path} goes from the shape {small} to {large} when 3 samples become {larger}")


def _check(layout: Layout, once: Any, again: Any, part: Any, *, are_equal: bool) -> None:
    """Check that 3 samples cut out of more are those collated alone, where collating gives the same each time.

    A type may say how it is cut. Unlike samples may be sorted, so of these only what all samples share is compared.
    """
    repeated = {path: node for path, node, _ in layout.parts(again)}
    parts = {path: node for path, node, _ in layout.parts(part)}
    for path, node, role in layout.parts(once):
        has_samples = isinstance(role, SampleAxis)
        is_compared = not has_samples or (are_equal and find_splitter(node) is None)
        if is_compared and same_values(node, repeated[path]) and not same_values(node, parts[path]):
            raise uncuttable(f"{path} depends on where in the batch a sample is, or on how many there are")


def read_ready_made(batch: Any) -> Layout:
    """Read the layout of a batch that comes ready-made: samples lie on the first axis of all its parts."""
    roles: dict[str, Role] = {}
    for path, node, role in _parts("batch", batch, top=True):
        roles[path] = role or SampleAxis()
        # A list of numbers may be an image size, as likely as one number for each sample.
        if role is None and is_plain_sequence(node) and any(isinstance(value, Number) for value in node):
            raise uncuttable(f"it comes ready-made, and the numbers in {path} may belong to all samples or to each")
    layout = Layout(roles)
    try:
        layout.samples(batch)
    except LayoutError as error:
        raise LayoutError(
            f"{error} It comes ready-made, so samples should lie on the first axis of each part."
        ) from None
    return layout


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
