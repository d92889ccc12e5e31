"""Mute the callbacks and the warnings of one trainer, for passes that are no training.

Lightning's ``trainer/call.py`` and ``utilities/rank_zero.py``.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lightning_ga.compat import patching


@contextmanager
def muted(trainer: Any) -> Iterator[None]:
    """Return a context in which this trainer's callbacks are not called and nothing warns: training will.

    The callbacks stay in ``trainer.callbacks``, where steps may look. The loops and plugins call them through one
    function of ``trainer/call.py``; calls of other trainers pass through.
    """
    call = patching.sibling(trainer, "trainer.call")
    hooks = call._call_callback_hooks
    if not isinstance(hooks, _Unmuted):
        hooks = call._call_callback_hooks = _Unmuted(hooks)
    hooks.muted.append(trainer)
    texts = [(cache, set(cache)) for cache in _warning_caches(trainer)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for cache, before in texts:
            cache.clear()
            cache.update(before)
        hooks.muted.remove(trainer)
        if not hooks.muted:
            call._call_callback_hooks = hooks.call


def _warning_caches(trainer: Any) -> list[set[str]]:
    """Return the texts that Lightning will not warn of again (``utilities/rank_zero.py``: ``WarningCache``)."""
    root = patching.sibling(trainer, "trainer").__name__.removesuffix(".trainer")
    of_steps = patching.sibling(trainer, "loops.optimization.automatic").Closure.warning_cache
    return [of_steps, *_caches_below(root, len(sys.modules))]


@lru_cache(maxsize=2)
def _caches_below(root: str, _loaded: int) -> list[set[str]]:
    """Look through all modules once, and again after others were imported: a look takes as long as a small step."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{root}.")]
    caches = [getattr(module, "warning_cache", None) for module in modules]
    return [cache for cache in caches if isinstance(cache, set)]


class _Unmuted:
    """Calls the hooks of callbacks through Lightning's own function, except for trainers that are muted."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.muted: list[Any] = []  # each as often as it was muted

    def __call__(self, trainer: Any, *arguments: Any, **settings: Any) -> Any:
        return None if any(other is trainer for other in self.muted) else self.call(trainer, *arguments, **settings)
