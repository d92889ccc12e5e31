"""Replace methods of single instances, and find modules of the trainer's own namespace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import MethodType
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

    A replacement by others that has come meanwhile stays, and what it keeps of this one calls the method of before.
    """
    held = vars(instance)
    before, original, active = {name: held[name] for name in (method,) if name in held}, getattr(instance, method), True

    @wraps(original)
    def through(_: Any, *arguments: Any, **settings: Any) -> Any:
        return (replacement if active else original)(*arguments, **settings)

    # A method, as schedules of the learning rate wrap it by its ``__func__`` (``torch/optim/lr_scheduler.py``).
    ours = held[method] = MethodType(through, instance)
    try:
        yield
    finally:
        active = False
        if held.get(method) is ours:
            del held[method]
            held.update(before)


def sibling(trainer: Any, name: str) -> Any:
    """Import a module of the trainer's own namespace: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root = type(trainer.fit_loop).__module__.removesuffix(".loops.fit_loop")
    return import_module(f"{root}.{name}")
