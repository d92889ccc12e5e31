"""Let a compiled module have one graph for micro-batches of all sizes: their axis of samples is dynamic from the first.

PyTorch compiles for the first size alone, and again, with a dynamic axis, for the second (``torch/_dynamo`` of 2.15).
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch


class CompiledModules:
    """Marks the axis of samples in micro-batches, if a module is compiled and its settings leave that to PyTorch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def mark(self, tensors: Iterable[torch.Tensor], samples: int) -> None:
        """Mark those of a micro-batch's ``tensors`` whose first axis is that of its ``samples``."""
        if not self._is_wanted:
            return
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] == samples:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @cached_property
    def _is_wanted(self) -> bool:
        """Whether modules are compiled, and all of them may have dynamic axes: CUDA graphs are recorded for a size."""
        if "torch._dynamo" not in sys.modules:
            return False
        found = [*_contexts(self._trainer.lightning_module)]
        return bool(found) and all(map(_is_open, found))


def _contexts(module: Any) -> Iterator[Any]:
    """Yield the settings of each compiled module, however it was compiled."""
    for part in module.modules():
        if isinstance(part, torch._dynamo.OptimizedModule):  # torch.compile(module)
            yield part.dynamo_ctx
        elif part._compiled_call_impl is not None:  # module.compile(): its wrapper closes over the compile context
            yield inspect.getclosurevars(part._compiled_call_impl).nonlocals.get("self")
    lightnings = getattr(module, "_compiler_ctx", None)  # trainer.fit(torch.compile(module)): Lightning unwraps it
    if lightnings is not None:
        yield lightnings["dynamo_ctx"]


def _is_open(context: Any) -> bool:
    settings = getattr(context, "compiler_config", None) or {}
    return getattr(context, "_dynamic", False) is None and not settings.get("triton.cudagraphs")
