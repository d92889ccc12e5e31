"""Optimizers of timm, with the parameter groups that its users expect.

Tested in tests/models/test_timm_optimizers.py.
"""

from typing import Any

import torch
from timm import optim
from torch import nn

from lightning_ga.errors import UserError


def timm_optimizer(
    model: nn.Module, *, name: str = "adamw", lr: float = 1e-3, layer_decay: float | None = None, **options: Any
) -> torch.optim.Optimizer:
    """Call ``timm.optim.create_optimizer_v2`` on a module, whose norms and biases then have no weight decay.

    With ``layer_decay`` timm gives each group a ``lr_scale``, which only its own schedulers read: here the rates of the
    groups are multiplied by it, and schedulers of PyTorch keep their ratio.

    Args:
        model: The module, such as ``self`` in ``configure_optimizers``: timm groups parameters by their names.
        name: A name of ``timm.optim.list_optimizers()``.
        lr: Learning rate of the last layer.
        layer_decay: The rate of a layer ÷ that of the layer behind it, above 0 and at most 1.
        **options: Further arguments of ``create_optimizer_v2``, such as ``weight_decay`` or ``betas``.

    Raises:
        UserError: For parameters in place of a module.
    """
    if not isinstance(model, nn.Module):
        raise UserError("optimizer=timm groups parameters by their names: call it with the module, optimizer(self).")
    optimizer: torch.optim.Optimizer
    optimizer = optim.create_optimizer_v2(model, name, lr=lr, layer_decay=layer_decay, **options)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] *= group.pop("lr_scale", 1.0)
    return optimizer
