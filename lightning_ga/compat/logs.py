"""Collect what a step logs, so that a batch that runs in pieces can log it once, merged.

All logging ends in ``log`` of the running loop's results (2.6.6, ``trainer/connectors/logger_connector/result.py``),
which also counts the samples of ``results.batch``: there lies the whole batch all the time.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_ga.compat import patching


def collected(results: Any, note: Callable[..., None]) -> AbstractContextManager[None]:
    """Return a context in which ``note(hook, name, value, settings)`` gets what is logged.

    Prediction has no ``results`` and logs nothing. Lightning has copied a tensor and cut its graph off.
    """
    if results is None:
        return nullcontext()
    return patching.shadowed(results, "log", lambda fx, name, value, **more: note(fx, name, plain(value), more))


def plain(value: Any) -> Any:
    """Return a tensor without its graph; one of a user's class, which may do anything when merged, as a plain one."""
    if isinstance(value, Tensor) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(Tensor)
    return value.detach() if isinstance(value, Tensor) else value
