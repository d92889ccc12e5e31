"""Replace methods of single instances, and find modules of the trainer's own namespace."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import Any


class shadowed:  # noqa: N801
    """A context in which a method of one instance is replaced; afterwards it is what it was before.

    The replacement is called without the instance. A replacement by others that has come meanwhile stays, and what it
    keeps of this one calls the method of before.
    """

    def __init__(self, instance: Any, method: str, replacement: Callable[..., Any]) -> None:
        self._instance, self._method, self._called = instance, method, replacement
        self._held, self._original = vars(instance), getattr(instance, method)
        self._before: Any = None  # what others had put there
        self._ours: Any = None

    def __enter__(self) -> None:
        @wraps(self._original)
        def through(_: Any, *arguments: Any, **settings: Any) -> Any:
            return self._called(*arguments, **settings)

        # A method, as schedules of the learning rate wrap it by its ``__func__`` (``torch/optim/lr_scheduler.py``).
        self._before, self._ours = self._held.get(self._method), MethodType(through, self._instance)
        self._held[self._method] = self._ours

    def __exit__(self, *_: object) -> None:
        self._called = self._original
        if self._held.get(self._method) is not self._ours:
            return
        if self._before is None:
            del self._held[self._method]
        else:
            self._held[self._method] = self._before


def sibling(trainer: Any, name: str) -> Any:
    """Import a module of the trainer's own namespace: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")
