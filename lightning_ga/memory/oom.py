"""Recognise an out-of-memory error, and free the memory that it keeps alive.

A caught exception holds its traceback, the traceback the frames, and the frames the activations. Nothing is freed
inside ``except ... as error``: ``attempt`` keeps the error, leaves the block, then releases it.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ga.memory.vendors import VENDORS, vendors_in_use

_OUT_OF_MEMORY = (
    *chain.from_iterable(vendor.out_of_memory for vendor in VENDORS),
    "C10 Out of Memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_AMBIGUOUS = tuple(text for vendor in VENDORS for text in vendor.ambiguous)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device or on the host.

    An error that was raised while handling an out-of-memory error is one, too. If it is a bug, a retry with fewer
    samples shows it by itself; the opposite mistake would end the run.

    Examples:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if not isinstance(error, Exception):
        return False
    kinds = (torch.OutOfMemoryError, MemoryError)
    return any(isinstance(link, kinds) or _says(link, _OUT_OF_MEMORY) for link in _linked(error))


def is_ambiguous_out_of_memory(error: BaseException) -> bool:
    """Return whether an error may mean that memory ran out: it does if a smaller size passes."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        return False
    return any(_says(link, _AMBIGUOUS) for link in _linked(error))


def may_be_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, certainly or maybe."""
    return is_out_of_memory(error) or is_ambiguous_out_of_memory(error)


class Outcome(NamedTuple):
    """The outcome of something that may run out of memory."""

    result: Any = None  # what was returned
    failure: Exception | None = None  # the error that ended it; ``None`` if it went through


def attempt(
    run: Callable[..., Any], catches: Callable[[Exception], bool] = is_out_of_memory, *arguments: Any
) -> Outcome:
    """Run something, and drop the frames of its failure; errors that it does not catch are raised.

    If memory ran out, also free what these frames kept alive.
    """
    try:
        return Outcome(run(*arguments))
    except Exception as error:
        if not catches(error):
            raise
        failure = error
    if may_be_out_of_memory(failure):
        release(failure)
    else:
        _drop_frames(failure)
    return Outcome(failure=failure)


def retry_once(run: Callable[[], Any]) -> Any:
    """Run a function, and if memory runs out, once more after freeing what the first attempt kept alive."""
    outcome = attempt(run)
    return outcome.result if outcome.failure is None else run()


def release(error: BaseException) -> None:
    """Free the memory that an out-of-memory error keeps alive, and return cached blocks to the devices.

    Call it outside the ``except`` block.
    """
    _drop_frames(error)
    _settle_backward_threads()
    gc.collect()
    empty_caches()


def _drop_frames(error: BaseException) -> None:
    """Drop the frames of an error and of its chain: they die with the tracebacks."""
    for link in _linked(error, suppressed=True):
        link.__traceback__ = None


def empty_caches() -> None:
    """Return unused cached blocks of every accelerator in use to its device; start no accelerator."""
    for vendor in vendors_in_use():
        vendor.backend.empty_cache()


def _settle_backward_threads() -> None:
    """Give the threads of backward passes other work: only then do they release an error and its gradients.

    An error wakes the main thread before that (``Engine::thread_main`` in ``torch/csrc/autograd/engine.cpp``).
    """
    for device in chain.from_iterable(vendor.devices() for vendor in vendors_in_use()):
        # Memory may be short even now; a budget of live tensors, which is a mode, still counts that thread's memory.
        with suppress(Exception), _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.zeros((), device=device, requires_grad=True).clone())


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(map(str(error).__contains__, texts))


def _linked(error: BaseException, *, suppressed: bool = False) -> Iterator[BaseException]:
    """Yield the error, its members if it is a group, and those it was raised from or while handling, each once."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending.append(link.__cause__)
        if suppressed or not link.__suppress_context__:
            pending.append(link.__context__)
        if isinstance(link, BaseExceptionGroup):
            pending.extend(link.exceptions)
