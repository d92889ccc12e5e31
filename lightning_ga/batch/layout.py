"""Where the samples of a batch lie, by the part of the batch, and how many there are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container
from lightning_ga.errors import UserError

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

    A batch of several loaders, with 8 and 24 samples, counts as 8 of one and three: micro-batches keep its proportions.
    """

    roles: Mapping[str, Role]  # by the path of each part

    def samples(self, batch: Any) -> int:
        """Return the samples of a batch; of several loaders with different numbers, the greatest common divisor."""
        return gcd(*self.sizes(batch).values())

    def sizes(self, batch: Any) -> dict[int, int]:
        """Return the samples of a batch from each loader that has any in it; refuse one whose parts disagree."""
        found: dict[int, tuple[int, str]] = {}
        for loader, here, path in self._counts("batch", batch):
            there, first = found.setdefault(loader, (here, path))
            if here != there:
                raise uncuttable(f"{first} holds {there} of them and {path} {here}")
        if not found:
            raise uncuttable("nothing in it grows with them")
        return {loader: samples for loader, (samples, _) in found.items()}

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


def uncuttable(why: str) -> LayoutError:
    """Return the error of a batch that cannot be cut, with the way out."""
    return LayoutError(f"The batch cannot be cut into samples, as {why}: {WAY_OUT}.")


def unknown_type(path: str, node: Any) -> LayoutError:
    """Return the error of a value of a type that is not known."""
    name = type(node).__name__
    return LayoutError(
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {WAY_OUT}."
    )


def _changed(path: str, node: Any) -> LayoutError:
    shape = extents(node)
    now = f" and the shape {shape}" if shape is not None and not is_plain_sequence(node) else ""
    kind = f"now {type(node).__name__}{now}"
    return uncuttable(f"{path} is of another kind than in the batches that were read before ({kind})")
