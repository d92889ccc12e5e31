"""Replace methods of single instances, and find modules of the trainer's own namespace."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def shadow(instance: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one instance.

    Args:
        instance: The instance.
        method: The method's name.
        replacement: Called instead, without the instance.
    """
    instance.__dict__[method] = replacement


def unshadow(instance: Any, method: str) -> None:
    """Restore the class's method of an instance."""
    instance.__dict__.pop(method, None)


class shadowed:  # noqa: N801
    """A context in which a method of one instance is replaced; afterwards it is what it was before.

    A replacement by others that has come meanwhile stays.

    Args:
        instance: The instance.
        method: The method's name.
        replacement: Called instead, without the instance.
    """

    def __init__(self, instance: Any, method: str, replacement: Callable[..., Any]) -> None:
        self._attributes, self._method, self._replacement = vars(instance), method, replacement
        self._before: Any = None  # what others had put there

    def __enter__(self) -> None:
        self._before = self._attributes.get(self._method)
        self._attributes[self._method] = self._replacement

    def __exit__(self, *_: object) -> None:
        if self._attributes.get(self._method) is not self._replacement:
            return
        if self._before is None:
            del self._attributes[self._method]
        else:
            self._attributes[self._method] = self._before


def sibling(trainer: Any, name: str) -> Any:
    """Import a module of the trainer's own namespace: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")
