"""Accumulate the gradients of half-precision parameters in float32.

A sum in bfloat16 loses what is below 1/256 of it, and with many micro-batches that is most of what each adds. The first
gradient of a window is exact as it is; it becomes float32 before the second is added, and the sum is rounded once,
after clipping.

Newer torch lets a gradient have another type than its parameter (``Tensor.grad_dtype``, read in 2.15). Without it, the
float32 sum is kept beside the gradient, which always holds it rounded.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

_HALF = (torch.bfloat16, torch.float16)
_SUMS: Any = WeakIdKeyDictionary()  # of each parameter, in torch without ``grad_dtype``


def has_grad_dtype() -> bool:
    """Return whether torch lets gradients have another type than their parameters."""
    return hasattr(Tensor, "grad_dtype")


def half_parameters(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters of a module whose gradients are summed in float32, frozen ones too."""
    return [parameter for parameter in module.parameters() if parameter.dtype in _HALF]


def begin(parameters: Iterable[Tensor]) -> None:
    """Let gradients be float32 from here on."""
    for parameter in parameters:
        if has_grad_dtype():
            parameter.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]
        elif parameter not in _SUMS and parameter.requires_grad:
            _SUMS[parameter] = Sum(parameter)


def widen(parameters: Iterable[Tensor]) -> None:
    """Make gradients float32, between two passes of a window."""
    for parameter, gradient in _gradients(parameters):
        if gradient.dtype in _HALF and _may_be_wide(parameter):
            parameter.grad = gradient.float()


def narrow(parameters: Iterable[Tensor]) -> None:
    """Round gradients to the types of their parameters, one after the other, before an optimizer's step."""
    for parameter, gradient in _gradients(parameters):
        if gradient.dtype != parameter.dtype and _may_be_wide(parameter):
            parameter.grad = gradient.to(parameter.dtype)


def end(parameters: Iterable[Tensor]) -> None:
    """Give parameters gradients of their own type again."""
    for parameter in parameters:
        if parameter in _SUMS:
            _SUMS.pop(parameter).remove()
        elif _may_be_wide(parameter):
            narrow([parameter])
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype  # type: ignore[attr-defined, unused-ignore]
            parameter.grad = gradient


def zero_sum(parameter: Tensor) -> Tensor:
    """Return a gradient of zeros as it is in the midst of a window, with the memory that its sum takes."""
    if parameter in _SUMS:
        _SUMS[parameter].total = torch.zeros_like(parameter, dtype=torch.float32)
    return torch.zeros_like(parameter, dtype=dtype_of_sum(parameter))


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient in the midst of a window."""
    return torch.float32 if _may_be_wide(parameter) else parameter.dtype


def narrow_before_steps(optimizer: Optimizer, parameters: list[Tensor]) -> Any:
    """Round gradients before every update of an optimizer, after its closure if any; return a handle to remove this."""

    def before(_: Optimizer, given: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        by_name = "closure" in settings
        closure = settings["closure"] if by_name else next(iter(given[1:]), None)
        if closure is None:
            narrow(parameters)
            return given, settings

        def evaluated() -> Any:
            loss = closure()
            narrow(parameters)
            return loss

        return (given, {**settings, "closure": evaluated}) if by_name else ((given[0], evaluated, *given[2:]), settings)

    return optimizer.register_step_pre_hook(before)


class Sum:
    """The float32 sum of a parameter's gradients; the gradient holds it rounded.

    All is done in place, so that an attempt that fails in between can be undone as any other.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.total: Tensor | None = None
        self._rounded: tuple[weakref.ref[Tensor], int] | None = None  # the gradient that holds it, and its version
        self._handles = (
            parameter.register_hook(lambda _: self._before(parameter)),  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._after),  # type: ignore[no-untyped-call]
        )

    def remove(self) -> None:
        """Stop summing, and leave the gradient as it is."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before(self, parameter: Tensor) -> None:
        """Just before autograd adds: let it add to zeros, so that what it adds can be read off."""
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            self.total = None
            return
        if self.total is None or not self._is_rounded(gradient):  # written to by something else, or zeroed
            self.total = gradient.float()
        with _unsafe_preserve_version_counter(gradient):
            gradient.zero_()

    @torch.no_grad()
    def _after(self, parameter: Tensor) -> None:
        """Just after: add it to the sum."""
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return
        if self.total is None:
            self.total = gradient.float()
        else:
            gradient.copy_(self.total.add_(gradient))
        self._rounded = weakref.ref(gradient), gradient._version

    def _is_rounded(self, gradient: Tensor) -> bool:
        rounded, version = self._rounded or (None, 0)
        return rounded is not None and rounded() is gradient and version == gradient._version


def _gradients(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)


def _may_be_wide(parameter: Tensor) -> bool:
    return getattr(parameter, "grad_dtype", parameter.dtype) is None
