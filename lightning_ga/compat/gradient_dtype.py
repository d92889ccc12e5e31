"""Accumulate the gradients of half-precision parameters in float32 (when: ``fit/window_gradients.py``).

The first gradient of a window becomes float32 before the second is added, and the sum is rounded once, after clipping.
This needs a torch that lets a gradient have another type than its parameter (``Tensor.grad_dtype``, read in 2.15).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_HALF = (torch.bfloat16, torch.float16)

SUMS_ARE_ROUNDED = (
    f"torch {torch.__version__} rounds sums of half-precision gradients to their parameters' type after each "
    "micro-batch, which loses precision; a newer torch (2.10 or later) sums them in float32."
)


def has_grad_dtype() -> bool:
    """Return whether torch lets gradients have another type than their parameters."""
    return hasattr(Tensor, "grad_dtype")


def half_parameters(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters of a module whose gradients are summed in float32, frozen ones too."""
    return [parameter for parameter in module.parameters() if parameter.dtype in _HALF]


def begin(parameters: Iterable[Tensor]) -> None:
    """Let gradients be float32 from here on."""
    for parameter in parameters:
        parameter.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]


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
    for parameter in filter(_may_be_wide, parameters):
        narrow([parameter])
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = parameter.dtype  # type: ignore[attr-defined, unused-ignore]
        parameter.grad = gradient


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient in the middle of a window."""
    return torch.float32 if _may_be_wide(parameter) else parameter.dtype


def narrow_before_steps(optimizer: Optimizer, parameters: list[Tensor]) -> Any:
    """Round gradients before every update of an optimizer, after its closure if any; return a handle to remove this."""

    def before(_: Optimizer, given: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        closure = next(iter(given[1:]), settings.get("closure"))
        if closure is None:
            narrow(parameters)
            return None

        def evaluated() -> Any:
            loss = closure()
            narrow(parameters)
            return loss

        return given[:1], {**settings, "closure": evaluated}

    return optimizer.register_step_pre_hook(before)


def _gradients(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)


def _may_be_wide(parameter: Tensor) -> bool:
    return getattr(parameter, "grad_dtype", parameter.dtype) is None
