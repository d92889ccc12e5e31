"""The namespace that a trainer is from, and methods of single instances exchanged for others.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def shadow(instance: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Let one instance answer a method with a replacement."""
    instance.__dict__[method] = replacement


def unshadow(instance: Any, method: str) -> None:
    """Give an instance its class's method back."""
    instance.__dict__.pop(method, None)


def sibling(trainer: Any, name: str) -> Any:
    """A module of the namespace that the trainer is from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")
