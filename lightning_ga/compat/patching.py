"""Replace methods of single instances, and find modules of the trainer's own namespace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def shadowed(instance: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which a method of one instance is replaced; afterwards it is what it was before.

    A replacement by others that has come meanwhile stays.
    """
    before = {name: value for name, value in vars(instance).items() if name == method}
    shadow(instance, method, replacement)
    try:
        yield
    finally:
        if vars(instance).get(method) is replacement:
            unshadow(instance, method)
            vars(instance).update(before)


def sibling(trainer: Any, name: str) -> Any:
    """Import a module of the trainer's own namespace: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")
