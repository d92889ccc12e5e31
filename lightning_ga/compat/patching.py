"""Replace methods and attributes of single instances; support ``lightning.pytorch`` and ``pytorch_lightning``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING or find_spec("pytorch_lightning") is None:
    Callback = pl.Callback
else:
    import pytorch_lightning

    class Callback(pl.Callback, pytorch_lightning.Callback):
        """A callback that trainers of both namespaces accept: each checks the type."""


def nothing(*_: object) -> None:
    """Do nothing: the default of a function to call."""


@contextmanager
def shadowed(instance: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which a method of one instance is replaced; afterwards it is what it was before.

    The replacement is called without the instance. If others have replaced the method meanwhile, their replacement
    stays, and its reference to this one calls the original method.
    """
    held = vars(instance)
    original = getattr(instance, method)
    called = replacement

    @wraps(original)
    def through(owner: Any, *arguments: Any, **settings: Any) -> Any:
        if owner is not instance:  # a deep copy has this method, too
            return getattr(type(owner), method)(owner, *arguments, **settings)
        return called(*arguments, **settings)

    # A bound method, because schedulers wrap it by its ``__func__`` (``torch/optim/lr_scheduler.py``).
    before = held.get(method)
    ours = MethodType(through, instance)
    held[method] = ours
    try:
        yield
    finally:
        called = original
        if held.get(method) is ours:
            if before is None:
                del held[method]
            else:
                held[method] = before


def sibling(trainer: Any, name: str) -> Any:
    """Import a module of the trainer's own namespace: ``lightning.pytorch`` or ``pytorch_lightning``."""
    return import_module(f"{type(trainer.fit_loop).__module__.removesuffix('.loops.fit_loop')}.{name}")


@contextmanager
def replaced(instance: Any, **values: Any) -> Iterator[None]:
    """Return a context in which attributes of an instance have other values."""
    before = {name: getattr(instance, name) for name in values}
    try:
        for name, value in values.items():
            setattr(instance, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(instance, name, value)
