"""Keep the containers of a batch before an attempt, and restore them."""

from collections.abc import MutableMapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from lightning_ga.batch.pytree import open_container
from lightning_ga.snapshot.checksums import changed_by_value, checksums
from lightning_ga.snapshot.contents import refill


class BatchSnapshot:
    """Containers of a batch as they are, and versions of its tensors: nothing is copied.

    Values are compared, too, where the step may change them without raising a version.
    """

    def __init__(self, batch: Any, *, by_value: bool = False) -> None:
        self._batch = batch
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        self._take(batch)
        self._versions = [tensor._version for tensor in self._tensors]
        self._sums = checksums(self._tensors) if by_value else []

    def restore(self) -> None:
        """Give containers their contents back."""
        for container, kept in self._containers:
            refill(container, kept)

    def lost(self) -> str | None:
        """Name a tensor that was changed in place."""
        changed = self._changed_by_version() or changed_by_value(self._tensors, self._sums)
        return f"its batch in place ({_place_of(changed[0], self._batch)})" if changed else None

    def changes_unseen(self) -> bool:
        """Return whether values have changed where no version tells."""
        return bool(changed_by_value(self._tensors, self._sums)) and not self._changed_by_version()

    def _changed_by_version(self) -> list[Tensor]:
        return [tensor for tensor, version in zip(self._tensors, self._versions) if tensor._version != version]

    def _take(self, node: Any) -> None:
        if isinstance(node, Tensor):
            if not node.is_inference():
                self._tensors.append(node)
            return
        if isinstance(node, list):
            self._containers.append((node, list(node)))
        elif isinstance(node, MutableMapping):
            self._containers.append((node, dict(node)))
        elif is_dataclass(node) and not isinstance(node, type) and hasattr(node, "__dict__"):
            self._containers.append((vars(node), dict(vars(node))))
        for child in node if type(node) in (list, tuple) else [inner for _, inner in open_container(node) or ()]:
            self._take(child)


def _place_of(tensor: Tensor, node: Any, path: str = "batch") -> str | None:
    """Return where a tensor lies in a batch."""
    if node is tensor:
        return path
    places = (_place_of(tensor, child, path + name) for name, child in open_container(node) or ())
    return next((place for place in places if place is not None), None)
