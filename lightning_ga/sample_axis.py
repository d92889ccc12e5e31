"""Find the samples in a batch of any structure: how many there are, and which of its parts have one for each.

A part whose length is the number of samples is cut, a part of any other length (class weights, the
size of the images) belongs to all samples. What is left to decide are lists and tuples, which may
hold fields ``(images, labels)`` or samples ``[image, image, …]``: lengths decide, and where they
allow for both, nothing is guessed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Number
from types import MappingProxyType
from typing import Any, Literal

import torch

from lightning_ga.errors import UserError
from lightning_ga.structures import Kind, is_plain_sequence, kind_of, leaf_length, open_container

Role = Literal["samples", "shared", "fields"]

_FEW = 4  # so few things in a list may be one for each sample, or not
_WAY_OUT = "define split_batch(self, batch, sizes) on the LightningModule"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples of a batch are.

    Attributes:
        samples: How many there are.
        roles: For each part, by the path that leads to it: whether it has one entry for each sample,
            belongs to all samples, or is a list of fields.
    """

    samples: int
    roles: Mapping[str, Role] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Vote:
    """What one part says of the number of samples; nothing if its type is not known.

    Attributes:
        path: How to get to the part.
        node: The part.
        length: Its length, be it a tensor or a list of samples.
        as_fields: The lengths that it may have as a list of fields: those of all its things.
        within: Lengths of everything in it.
    """

    path: str
    node: Any
    length: int | None = None
    as_fields: frozenset[int] = frozenset()
    within: frozenset[int] = frozenset()

    @property
    def options(self) -> frozenset[int]:
        """All that the number of samples may be."""
        return self.as_fields if self.length is None else self.as_fields | {self.length}


def batch_samples(batch: Any, *, expected: int | None = None, like: Layout | None = None) -> int:
    """How many samples a batch holds: the length that most of its parts have along their first axis.

    Args:
        batch: Tensors in any structure.
        expected: What the loader was asked for, where that is known: it decides between lengths.
        like: The layout of an earlier batch of the same loader.

    Raises:
        UserError: If the lengths do not tell.

    Examples:
        >>> import torch
        >>> batch_samples({"ids": torch.zeros(8, 7), "labels": torch.zeros(8), "size": (224, 224)})
        8
        >>> batch_samples(([torch.zeros(3, 9), torch.zeros(3, 5)], [{"file": "a"}, {"file": "b"}]))
        2
    """
    return read_layout(batch, expected=expected, like=like).samples


def read_layout(batch: Any, *, expected: int | None = None, like: Layout | None = None) -> Layout:
    """Where the samples of a batch are.

    Read a full batch first and give its layout with all later ones: in a last batch of three samples
    everything of length three looks as if it were cut, a matrix for all samples too.

    Args:
        batch: Tensors in any structure.
        expected: How many samples there should be, where that is known.
        like: The layout of an earlier batch of the same loader.

    Raises:
        UserError: If the lengths do not tell, or a type is not known, with the part and the way out.

    Examples:
        >>> import torch
        >>> dict(read_layout([torch.zeros(8, 7), torch.zeros(3, 3)], expected=8).roles)
        {'batch': 'fields', 'batch[0]': 'samples', 'batch[1]': 'shared'}
    """
    known = like.roles if like is not None else {}
    votes = _votes("batch", batch, known)
    for vote in votes:
        if vote.length is None:
            raise UserError(_unknown_type(vote.path, vote.node))
    if expected is not None and are_second(batch, expected):
        raise UserError(_samples_are_second(batch, expected))
    samples = _known_samples(votes, known)
    samples = _choose(votes, expected) if samples is None else samples
    reader = _Reader(samples, known, _has_list_of_samples(batch, samples))
    reader.read("batch", batch)
    return Layout(samples, reader.roles)


def _votes(path: str, node: Any, known: Mapping[str, Role] = MappingProxyType({})) -> list[_Vote]:
    kind = kind_of(node)
    if kind == "leaf":
        length = leaf_length(node)
        return [_Vote(path, node, length, within=frozenset({length or 0}))]
    if kind == "record" or (kind == "series" and known.get(path) == "fields"):
        return [vote for name, child in open_container(node) or () for vote in _votes(path + name, child, known)]
    if kind == "series":
        inner = [_votes("", thing) for thing in node if thing is not None]
        within = frozenset(length for votes in inner for vote in votes for length in vote.within)
        return [_Vote(path, node, len(node), _common(inner), within | {len(node)})]
    return [] if kind == "constant" else [_Vote(path, node)]


def _common(inner: list[list[_Vote]]) -> frozenset[int]:
    """Lengths that everything in all things of a series may have."""
    if not inner or not all(inner):
        return frozenset()
    return frozenset.intersection(*(vote.options for votes in inner for vote in votes))


def _known_samples(votes: list[_Vote], known: Mapping[str, Role]) -> int | None:
    """Length of the parts that had one entry for each sample in an earlier batch, if they agree."""
    lengths = {vote.length for vote in votes if known.get(vote.path) == "samples"}
    return lengths.pop() if len(lengths) == 1 else None


def are_second(batch: Any, expected: int) -> bool:
    """Whether every tensor has the expected samples along its second axis and none along its first: time comes first.

    Examples:
        >>> are_second([torch.zeros(5, 8, 3), torch.zeros(5, 8)], 8), are_second([torch.zeros(5, 8), torch.zeros(5)], 8)
        (True, False)
    """
    parts = [tensor for tensor in _tensors(batch) if not tensor.is_nested and tensor.dim()]
    second = [part.dim() > 1 and part.size(1) == expected != part.size(0) for part in parts]
    return expected > 1 and bool(parts) and all(second)


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
        return
    for _, child in open_container(node) or ():
        yield from _tensors(child)


def _choose(votes: list[_Vote], expected: int | None) -> int:
    if expected is not None and any(expected in vote.within for vote in votes):
        return expected
    strong = [vote for vote in votes if not _is_of_numbers(vote.node)] or votes
    scores = Counter(length for vote in strong for length in vote.options)
    highest = max(scores.values(), default=0)
    best = {length for length, score in scores.items() if score == highest}
    if len(best) == 1 and not (len(strong) == 1 and _is_doubtful(strong[0])):
        return best.pop()
    as_fields = max(best.intersection(*(vote.as_fields for vote in strong)), default=0)
    if strong and all(_holds_fields(vote, as_fields) for vote in strong):
        return as_fields
    raise UserError(_ambiguous(votes))


def _is_doubtful(vote: _Vote) -> bool:
    """A few tensors of unequal lengths and nothing else: as many samples, or fields that not all samples have."""
    return kind_of(vote.node) == "series" and not vote.as_fields and len(vote.within) > 1 and _few(vote.node)


def _holds_fields(vote: _Vote, samples: int) -> bool:
    """Whether to take a list for fields that might be samples: it holds fewer things than each has entries."""
    return samples > (vote.length or 0) or (samples == 1 and _few(vote.node))


def _few(node: Any) -> bool:
    return 1 < len(node) <= _FEW


def _is_of_numbers(node: Any) -> bool:
    """Sizes, scales or labels: no evidence of the number of samples beside tensors."""
    return kind_of(node) == "series" and any(isinstance(thing, Number) for thing in node)


def _has_list_of_samples(node: Any, samples: int) -> bool:
    """Whether something in a batch can only be a list of samples: this loader does not stack them."""
    if kind_of(node) not in ("series", "record"):
        return False
    things = [thing for _, thing in open_container(node) or () if thing is not None]
    if kind_of(node) == "series" and len(node) == samples:
        inner = [_votes("", thing) for thing in things]
        if any(inner) and samples not in _common(inner):
            return True
    return any(_has_list_of_samples(thing, samples) for thing in things)


@dataclass(slots=True)
class _Reader:
    """Writes down the role of each part of a batch.

    Attributes:
        samples: How many samples there are.
        known: Roles of an earlier batch.
        lists: Whether something in the batch can only be a list of samples.
        roles: What has been found.
    """

    samples: int
    known: Mapping[str, Role]
    lists: bool
    roles: dict[str, Role] = field(default_factory=dict)

    def read(self, path: str, node: Any) -> None:
        kind = kind_of(node)
        if kind == "opaque":
            raise UserError(_unknown_type(path, node))
        if kind == "leaf":
            self.roles[path] = self.known.get(path) or ("samples" if leaf_length(node) == self.samples else "shared")
        elif is_plain_sequence(node):
            self.roles[path] = self.known.get(path) or self._role_of_list(path, node, kind)
        if self.roles.get(path) == "samples" and (length := _length(node)) != self.samples:
            raise UserError(
                f"{path} had one entry for each sample in earlier batches, and now has {length} for {self.samples} "
                f"samples: {_WAY_OUT}."
            )
        if self.roles.get(path, "fields") == "fields":
            for name, child in open_container(node) or ():
                self.read(path + name, child)

    def _role_of_list(self, path: str, node: Any, kind: Kind) -> Role:
        if len(node) != self.samples:
            return "fields"
        inner = [_votes("", thing) for thing in node if thing is not None]
        fit = [bool(votes) and all(self.samples in vote.options for vote in votes) for votes in inner]
        if kind == "record" and any(self.samples in vote.options for votes in inner for vote in votes):
            return "fields"
        if kind == "record" or not any(inner):
            doubtful = _few(node) and (kind == "record" or _is_of_numbers(node))
        elif all(fit):
            if self.samples == 1 or (path == "batch" and _is_usual(node)):
                return "fields"
            doubtful = not self.lists
        else:
            doubtful = any(fit) and path == "batch" and _few(node)
        if doubtful:
            raise UserError(_either_way(path, self.samples))
        return "samples"


def _is_usual(batch: Any) -> bool:
    """Whether a whole batch looks like fields: two images and two masks come as two tensors or as two lists.

    A list of tuples or dicts is what a collate function returns that leaves samples alone.
    """
    return isinstance(batch, tuple) or all(
        thing is None or isinstance(thing, list) or leaf_length(thing) is not None for thing in batch
    )


def _length(node: Any) -> int | None:
    length = leaf_length(node)
    return len(node) if length is None and is_plain_sequence(node) else length


def _either_way(path: str, samples: int) -> str:
    return (
        f"{path} has {samples} entries in a batch of {samples} samples, which may be one for each sample or belong to "
        f"all of them: make it one tensor, or {_WAY_OUT}."
    )


def _samples_are_second(batch: Any, expected: int) -> str:
    shape = tuple(next(_tensors(batch)).shape)
    return (
        f"The batch cannot be cut into samples: its {expected} samples lie along the second axis of a tensor of shape "
        f"{shape}, as in sequences with time first, and are looked for along the first: yield (samples, time, …) "
        "(batch_first=True), or define split_batch(self, batch, sizes) on the LightningModule."
    )


def _ambiguous(votes: list[_Vote]) -> str:
    lengths = ", ".join(f"{vote.path} has {' or '.join(map(str, sorted(vote.options)))}" for vote in votes)
    told = f"its parts do not agree on a number ({lengths})" if votes else "it has no tensor"
    return f"The batch cannot be cut into samples, as {told}: {_WAY_OUT}."


def _unknown_type(path: str, node: Any) -> str:
    name = type(node).__name__
    return (
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {_WAY_OUT}."
    )
