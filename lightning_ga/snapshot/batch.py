"""Keep the containers of a batch before an attempt, and restore them."""

from collections import deque
from collections.abc import MutableMapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from lightning_ga.batch.pytree import open_container


class BatchSnapshot:
    """Containers of a batch as they are, and versions of its tensors: nothing is copied.

    Args:
        batch: Tensors in any structure.
    """

    def __init__(self, batch: Any) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._take("batch", batch)

    def restore(self) -> None:
        """Give containers their contents back."""
        for container, kept in self._containers:
            refill(container, kept)

    def lost(self) -> str | None:
        """Name a tensor that was changed in place."""
        changed = (path for path, tensor, version in self._tensors if tensor._version != version)
        return next((f"its batch in place ({path})" for path in changed), None)

    def _take(self, path: str, node: Any) -> None:
        if isinstance(node, Tensor):
            if not node.is_inference():
                self._tensors.append((path, node, node._version))
            return
        if isinstance(node, list):
            self._containers.append((node, list(node)))
        elif isinstance(node, MutableMapping):
            self._containers.append((node, dict(node)))
        elif is_dataclass(node) and not isinstance(node, type) and hasattr(node, "__dict__"):
            self._containers.append((vars(node), dict(vars(node))))
        for name, child in open_container(node) or ():
            self._take(path + name, child)


def refill(container: Any, contents: Any) -> None:
    """Put contents back into the container that they were copied from."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)
