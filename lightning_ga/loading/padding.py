"""Find in padded batches how long their samples are, and cut a batch sorted by that, without columns of padding alone.

A batch shows its lengths by a mask, by numbers, or by targets that the loss ignores. Which part does so is read off a
few batches: beyond the lengths that it shows, every other part holds one value only. Axes that are always as long as
the mask hold the padding. Nothing else is known of the model: the exactness check measures whether it sees padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ga.batch.layout import BatchSlices, Layout, Role, SampleAxis, SampleCount, uncuttable
from lightning_ga.batch.pytree import extents, is_array, is_plain_sequence, open_container, rebuild
from lightning_ga.errors import UserError
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.lengths import SizeLimits, piece_sizes

_IGNORED = -100  # as in ``torch.nn.CrossEntropyLoss``
_KINDS = ("mask", "padding mask", "additive mask", "lengths", "ignored")
_LOW = -1e4  # what an additive mask is at most where attention is not to go
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class SizedSlices(BatchSlices):
    """A batch that is cut with its longest samples first, each slice as wide as its longest sample."""

    order: tuple[int, ...]  # places of the samples in the batch
    sizes: tuple[int, ...]  # of the samples in that order
    width: int  # of the batch, which may be padded further than its longest sample

    def pieces(self, limits: SizeLimits, number: int = 0) -> list[int]:
        """Return the samples of each piece, of as many as ranks have agreed on if a number is given.

        The whole is one piece if it is within the limits, unless the cost of a pass was measured and more are cheaper.
        """
        limits = replace(limits, pass_cost=None) if number else limits
        fits = self.samples <= limits.samples and self.samples * (self.width + limits.offset) <= limits.budget
        if fits and number <= 1 and limits.pass_cost is None:
            return [self.samples]
        return piece_sizes(self.sizes, limits, max(number, 1 if fits else 2))


@dataclass(frozen=True, slots=True)
class Padding:
    """A part of a batch that shows how long the samples are, and the axes that are padded to the longest."""

    path: str
    kind: str  # one of ``_KINDS``
    samples: int  # the axis of the samples in that part
    axes: Mapping[str, tuple[int, ...]]  # by path
    # By path of the others: the axis of the samples, the axis that is padded, and with what.
    fills: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)

    def spans(self, parts: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
        """Return where each sample begins and ends, and the width of the batch."""
        real = _real(self.kind, self.path, self.samples, parts)
        if real is None:
            raise uncuttable(f"{self.path} no longer shows how long they are")
        if self.kind == "ignored":  # later samples may have targets for some of their entries only
            for path, (samples, axis, fill) in self.fills.items():
                part = parts.get(path)
                if part is None:  # some batches may lack it
                    continue
                is_other = (part != fill).movedim((samples, axis), (0, 1))
                real = real | is_other.reshape(*real.shape, -1).any(2).cpu()
        return *_spans(real), real.shape[1]


def find_padding(batches: Sequence[Any], layout: Layout, size_of: str) -> tuple[Padding, ...]:
    """Find what shows the lengths in some batches; by its name, or all that does with ``"auto"``."""
    opened = [dict(_parts("batch", batch, layout)) for batch in batches]
    certain, possible = [], []
    for path in opened[0] if opened else ():
        role = layout.roles.get(path)
        is_meant = size_of == "auto" or path.endswith((f"[{size_of!r}]", f".{size_of}", f"[{size_of}]"))
        if not is_meant or not isinstance(role, SampleAxis) or role.per > 1:
            continue
        for kind in _KINDS:
            real = [_real(kind, path, role.axis, parts) for parts in opened]
            found = [each for each in real if each is not None and bool(each.any(1).all())]
            if len(found) < len(opened) or (kind == "ignored" and all(bool(each.all()) for each in found)):
                continue
            padding = Padding(
                path, kind, role.axis, _following(role.loader, [each.shape[1] for each in found], opened, layout)
            )
            possible.append(padding)
            if (fills := _fills(padding, found, opened, layout)) is not None:
                certain.append(replace(padding, fills=fills))
    chosen = certain if certain or size_of == "auto" else possible[:1]
    if not chosen:
        raise UserError(
            f"size_of={size_of!r} finds no part of the batches that shows how long their samples are (a mask, lengths, "
            "or targets of -100, beyond which the other parts hold one value only): add one to the batch and name it, "
            "as in size_of='attention_mask', or leave size_of= out."
        )
    return tuple(chosen)


def shows_lengths(batches: Sequence[Any], size_of: str, layout: Layout) -> bool:
    """Return whether padding is at the ends of samples, if these lie as the layout says: a mask has two axes."""
    try:
        paddings = find_padding(batches, layout, size_of)
    except UserError:
        return False
    opened = [dict(_parts("batch", batch, layout)) for batch in batches]
    found = (_real(each.kind, each.path, each.samples, parts) for each in paddings for parts in opened)
    return all(real is None or bool((real == _within(real)).all()) for real in found)


def slices_by_size(
    batch: Any,
    layout: Layout,
    paddings: Sequence[Padding],
    *,
    trims: bool = True,
    on_trim: Callable[[], None] = lambda: None,
) -> SizedSlices:
    """Return the slices of a batch with its longest samples first; ``on_trim`` is called for each without columns."""
    parts = dict(_parts("batch", batch, layout))
    samples, width, sizes = layout.samples(batch), 0, torch.zeros(0, dtype=torch.int64)
    bounds: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for padding in paddings:
        begins, ends, columns = padding.spans(parts)
        # A sample of several loaders holds as many entries of each as keep their proportion.
        entries = max(1, len(begins) // max(1, samples))
        begins, ends = begins.view(samples, entries).amin(1), ends.view(samples, entries).amax(1)
        sizes = torch.maximum(sizes, ends - begins) if len(sizes) else ends - begins
        width = max(width, columns)
        for place in ((path, axis) for path, axes in padding.axes.items() for axis in axes if trims):
            known = bounds.get(place, (begins, ends))
            bounds[place] = torch.minimum(begins, known[0]), torch.maximum(ends, known[1])
    order = sizes.argsort(descending=True, stable=True)

    def take(start: int, stop: int) -> Any:
        chosen = order[start:stop]
        firsts = {place: int(begins[chosen].min()) for place, (begins, _) in bounds.items()}
        # One column of padding at least, for samples without an entry.
        trims = {
            place: (firsts[place], max(firsts[place] + 1, int(e[chosen].max()))) for place, (_, e) in bounds.items()
        }
        if any(span != (0, parts[path].shape[axis]) for (path, axis), span in trims.items()):
            on_trim()
        return pick(batch, layout, chosen, trims)

    return SizedSlices(samples, take, tuple(order.tolist()), tuple(sizes[order].tolist()), width)


def pick(batch: Any, layout: Layout, chosen: Tensor, trims: Mapping[tuple[str, int], tuple[int, int]] = {}) -> Any:
    """Return a batch of the chosen samples, in that order, with columns left out along some axes of its parts."""
    samples = layout.samples(batch)
    each = {loader: size // max(1, samples) for loader, size in layout.sizes(batch).items()}
    return _Picked(layout.roles, each, chosen, trims).of("batch", batch)


@dataclass(frozen=True, slots=True)
class _Picked:
    """The chosen samples of a batch that holds ``each`` times as many of its loaders."""

    roles: Mapping[str, Role]
    each: Mapping[int, int]
    chosen: Tensor
    trims: Mapping[tuple[str, int], tuple[int, int]]

    def of(self, path: str, node: Any) -> Any:
        """Return what belongs to these samples in a part of the batch."""
        role = self.roles.get(path)
        if node is None:
            return None
        if role == "fields" and (children := open_container(node)) is not None:
            return rebuild(node, [self.of(path + name, child) for name, child in children])
        for axis in range(node.dim()) if isinstance(node, Tensor) and node.layout is torch.strided else ():
            first, end = self.trims.get((path, axis), (0, node.shape[axis]))
            if (first, end) != (0, node.shape[axis]):
                node = node.narrow(axis, first, min(end, node.shape[axis]) - first)
        if isinstance(role, SampleAxis):
            entries = self.each[role.loader] * role.per
            places = (self.chosen[:, None] * entries + torch.arange(entries)).flatten()
            return _rows(path, node, role.axis, places)
        if isinstance(role, SampleCount):
            count = len(self.chosen) * self.each[role.loader]
            return node.new_tensor(count) if isinstance(node, Tensor) else type(node)(count)
        return node


def _rows(path: str, node: Any, axis: int, places: Tensor) -> Any:
    if isinstance(node, Tensor) and node.layout is torch.strided and not node.is_nested:
        return node.index_select(axis, places.to(node.device))
    if is_plain_sequence(node):
        return rebuild(node, [node[place] for place in places.tolist()])
    if is_array(node) and hasattr(node, "take"):
        return node.take(places.numpy(), axis=axis)
    raise uncuttable(f"size_of= sorts them, and {path} is of the type {type(node).__name__}, which is not sorted here")


def _parts(path: str, node: Any, layout: Layout) -> Iterator[tuple[str, Any]]:
    if layout.roles.get(path) != "fields":
        yield path, node
        return
    for name, child in open_container(node) or ():
        yield from _parts(path + name, child, layout)


def _real(kind: str, path: str, samples: int, parts: Mapping[str, Any]) -> Tensor | None:
    """Return which entries of each sample are no padding, if a part shows that in such a way."""
    node: Any = parts.get(path)
    widest = max((max(extents(part) or (0,)) for part in parts.values()), default=0)
    if is_plain_sequence(node) and not all(type(each) is int for each in node):
        return None
    if not (isinstance(node, Tensor) or is_plain_sequence(node) or hasattr(node, "__array__")):
        return None
    try:
        tensor = torch.as_tensor(node).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # texts, objects, whole numbers beyond 64 bits
        if is_out_of_memory(error):
            raise
        return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if kind == "lengths":
        if tensor.dim() != 1 or tensor.dtype not in _INTEGERS or not len(tensor):
            return None
        if tensor.min() < 0 or tensor.max() > widest:  # identifiers or times
            return None
        return torch.arange(int(tensor.max())) < tensor[:, None]
    if tensor.dim() < 2 or tensor.is_complex():
        return None
    tensor = tensor.movedim(samples, 0)
    if sum(extent != 1 for extent in tensor.shape[1:]) > 1:
        return None
    tensor = tensor.flatten(1)  # axes of one, which attention spreads over heads and queries
    if kind == "ignored":
        return tensor != _IGNORED if tensor.dtype in _INTEGERS else None
    if kind == "additive mask":
        is_mask = tensor.is_floating_point() and bool(((tensor == 0) | (tensor <= _LOW)).all())
        return tensor == 0 if is_mask else None
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        return None
    return tensor != 0 if kind == "mask" else tensor == 0


def _spans(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each sample begins and ends; both are 0 if it has no entry."""
    ones, width = real.to(torch.int8), real.shape[1]
    any_real = real.any(1)
    return ones.argmax(1) * any_real, (width - ones.flip(1).argmax(1)) * any_real


def _within(real: Tensor) -> Tensor:
    begins, ends = _spans(real)
    columns = torch.arange(real.shape[1])
    return (columns >= begins[:, None]) & (columns < ends[:, None])


def _following(
    loader: int, widths: Sequence[int], opened: Sequence[Mapping[str, Any]], layout: Layout
) -> dict[str, tuple[int, ...]]:
    """Return the axes that are as long as the samples are padded to, in all batches, by path."""
    found = {}
    for path, node in opened[0].items():
        role, kinds = layout.roles.get(path), len(set(widths))
        is_by_sample = isinstance(role, SampleAxis) and role.loader == loader
        if not isinstance(node, Tensor) or not (is_by_sample or (role == "shared" and kinds > 1)):
            continue
        shapes = [tuple(parts[path].shape) for parts in opened if isinstance(parts.get(path), Tensor)]
        axes = [axis for axis in range(node.dim()) if not (isinstance(role, SampleAxis) and axis == role.axis)]
        follows = [axis for axis in axes if [shape[axis] for shape in shapes if len(shape) > axis] == [*widths]]
        if follows:
            found[path] = tuple(follows)
    return found


def _fills(
    padding: Padding, real: Sequence[Tensor], opened: Sequence[Mapping[str, Any]], layout: Layout
) -> dict[str, tuple[int, int, float]] | None:
    """Return the one value that each other part holds beyond what a part shows, and along which axes, by path.

    ``None`` if one of them holds several there, or none of them holds several before.
    """
    tells, fills = False, dict[str, tuple[int, int, float]]()
    for path, axes in padding.axes.items():
        role = layout.roles.get(path)
        if path == padding.path or not isinstance(role, SampleAxis):
            continue
        checks = [partial(_values, opened, real, path, role.axis, axis) for axis in axes]
        filled = [axis for axis, check in zip(axes, checks) if all(map(_is_one_value, check(beyond=True)))]
        if not filled:
            return None
        values = torch.cat([each.flatten() for each in checks[axes.index(filled[0])](beyond=True)])
        if len(values):
            fills[path] = (role.axis, filled[0], values[0].item())
        tells |= not all(map(_is_one_value, checks[0](beyond=False)))
    return fills if tells and not all(bool(_within(each).all()) for each in real) else None


def _values(
    opened: Sequence[Mapping[str, Any]], real: Sequence[Tensor], path: str, samples: int, axis: int, *, beyond: bool
) -> Iterator[Tensor]:
    """Yield a part's entries in each batch, beyond the samples or within them."""
    for parts, each in zip(opened, real):
        yield parts[path].detach().cpu().movedim((samples, axis), (0, 1))[_within(each) != beyond]


def _is_one_value(values: Tensor) -> bool:
    return not values.numel() or bool((values == values.flatten()[0]).all())
