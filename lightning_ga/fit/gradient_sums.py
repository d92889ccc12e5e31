"""What is done to the summed gradients of a window: sparse ones are coalesced, half-precision ones summed in float32.

Tested in tests/integration/test_half_parameters.py and tests/integration/test_sparse.py.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.compat import gradient_dtype, ranks
from lightning_ga.errors import ExactnessWarning
from lightning_ga.snapshot.copies import coalesce_gradients, sparse_parameters


class GradientSums:
    """Settles gradients between two backward passes, and rounds them before the optimizer's step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sparse: list[torch.nn.Parameter] | None = None  # parameters that may have sparse gradients, once known
        self._half: list[torch.Tensor] = []  # parameters whose gradients are summed in float32
        self._owes_warning = False  # whether a warning is due that torch rounds these sums

    def in_float32(self) -> AbstractContextManager[None]:
        """Return a context in which half-precision gradients are summed in float32, and rounded before each step."""
        if not ranks.gradients_are_private(self._trainer):
            return nullcontext()
        half = gradient_dtype.half_parameters(self._trainer.lightning_module)
        if not gradient_dtype.has_grad_dtype():
            self._owes_warning = bool(half)
            return nullcontext()
        self._half = half
        return gradient_dtype.float32_allowed(half)

    def settle(self, *, will_change: bool) -> None:
        """After a backward pass, coalesce sparse gradients; widen half-precision ones that ``will_change`` later."""
        if self._sparse is None:
            self._sparse = sparse_parameters(self._trainer.lightning_module)
        if self._sparse:
            coalesce_gradients(self._sparse)
        if will_change and self._half:
            gradient_dtype.widen(self._half)
        if will_change and self._owes_warning:
            self._owes_warning = False
            rank_zero_warn(gradient_dtype.SUMS_ARE_ROUNDED, category=ExactnessWarning)

    def round(self) -> None:
        """Round half-precision gradients to the precision of their parameters."""
        gradient_dtype.narrow(self._half)
