"""Collect what a step logs, so that a batch that runs in pieces can log it once, merged.

All logging ends in ``log`` of the running loop's results (2.6.6, ``trainer/connectors/logger_connector/result.py``),
which also counts the samples of ``results.batch``: there lies the whole batch all the time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ga.compat import patching

# By the name of ``reduce_fx``, a function or a text (``_Metadata`` in ``result.py``); else a mean.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of ``log`` in one piece."""

    fx: str  # the hook that it was called in
    name: str
    value: Tensor | Metric  # Lightning has copied a tensor and cut its graph off
    settings: dict[str, Any]  # all other arguments

    def log(self, results: Any) -> None:
        """Log it."""
        results.log(self.fx, self.name, self.value, **self.settings)

    def merged(self, entries: Sequence[Self], samples: Sequence[int], weights: Sequence[float]) -> Self:
        """Merge the entries of all pieces: add up sums, average means by weight or by a counted ``batch_size``."""
        settings, sizes = {**self.settings}, [entry.settings.get("batch_size") for entry in entries]
        if None not in sizes and _are_counts(sizes, samples):
            settings["batch_size"] = sum(sizes)
            weights = weights if sizes == [*samples] else [size or 0 for size in sizes]
        values = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
        if len(values) < len(entries):  # a metric has seen all pieces
            return replace(self, settings=settings)
        kind = settings.get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(kind.lower() if isinstance(kind, str) else kind.__name__)
        return replace(self, settings=settings, value=reduce(torch.stack(values)) if reduce else mean(values, weights))


def collected(results: Any, note: Callable[[Entry], None]) -> AbstractContextManager[None]:
    """Return a context in which ``note`` gets what is logged; prediction has no ``results`` and logs nothing."""
    if results is None:
        return nullcontext()

    def log(fx: str, name: str, value: Any, **settings: Any) -> None:
        note(Entry(fx, name, plain(value), settings))

    return patching.shadowed(results, "log", log)


def plain(value: Any) -> Any:
    """Return a tensor without its graph; one of a user's class, which may do anything when merged, as a plain one."""
    if isinstance(value, Tensor) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().as_subclass(Tensor)
    return value.detach() if isinstance(value, Tensor) else value


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average tensors of one element in at least single precision; leave out those of weight 0, means over nothing."""
    dtype = values[0].dtype if values[0].is_floating_point() or values[0].is_complex() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    pairs = [pair for pair in zip(values, weights) if pair[1]] or [(values[-1], 1.0)]
    if len({weight for _, weight in pairs}) == 1:  # fewer operations
        return torch.stack([value for value, _ in pairs]).to(wide).mean(0).to(dtype)
    total = torch.stack([value.to(wide) * weight for value, weight in pairs]).sum(0)
    return (total / sum(weight for _, weight in pairs)).to(dtype)


def _are_counts(sizes: Sequence[Any], samples: Sequence[int]) -> bool:
    """Return whether each ``batch_size`` was counted in its piece, and is not a constant such as the loader's."""
    if len(set(sizes)) > 1 or sizes == [*samples]:
        return True
    return len(set(samples)) == 1 and sizes[0] % samples[0] == 0 and sizes[0] != sum(samples)  # tokens, as many in each
