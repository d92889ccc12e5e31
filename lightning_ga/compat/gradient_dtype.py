"""Accumulate the gradients of half-precision parameters in float32 (when: ``fit/gradients.py``).

The first gradient of a window becomes float32 before the second is added, and the sum is rounded once.
This needs ``Tensor.grad_dtype`` (torch 2.10, read in 2.15): a gradient may have another type than its parameter.

Tested in tests/integration/test_half_parameters.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

SUMS_ARE_ROUNDED = (
    f"torch {torch.__version__} rounds sums of half-precision gradients to their parameters' type after each "
    "micro-batch, which loses precision; a newer torch (2.10 or later) sums them in float32."
)


def has_grad_dtype() -> bool:
    """Return whether torch lets gradients have another type than their parameters."""
    return hasattr(Tensor, "grad_dtype")


def half_parameters(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters of a module whose gradients are summed in float32, frozen ones too."""
    return [parameter for parameter in module.parameters() if parameter.dtype in (torch.bfloat16, torch.float16)]


@contextmanager
def float32_allowed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which gradients may be float32; at its end they are rounded."""
    for parameter in parameters:
        parameter.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        for parameter in filter(_may_be_wide, parameters):
            narrow([parameter])  # first: a gradient that is there has to be of the allowed type
            parameter.grad_dtype = parameter.dtype  # type: ignore[attr-defined, unused-ignore]


def widen(parameters: Iterable[Tensor]) -> None:
    """Make gradients float32, between two passes of a window."""
    for parameter in filter(_may_be_wide, parameters):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.float()


def narrow(parameters: Iterable[Tensor]) -> None:
    """Round gradients to the types of their parameters, one after the other, before they are clipped."""
    for parameter in filter(_may_be_wide, parameters):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(parameter.dtype)


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient in the middle of a window."""
    return torch.float32 if _may_be_wide(parameter) else parameter.dtype


def _may_be_wide(parameter: Tensor) -> bool:
    return getattr(parameter, "grad_dtype", parameter.dtype) is None
