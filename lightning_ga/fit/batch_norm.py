"""BatchNorm under accumulation: which layers there are, and the momentum that gives the same running statistics.

A BatchNorm layer sees micro-batches: its gradients are always those of the micro-batch (ghost batch
normalization), and its running statistics are updated once per micro-batch. With momentum
1 − (1 − m)^(1/A) they move per window as far as with momentum m in one pass.
"""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

RESCALE_IS_DEPRECATED = (
    'batch_norm="rescale" is deprecated: measured, evaluation is worse with a constant learning rate and hardly better '
    'with one that falls to 0; use batch_norm="ignore" with torch.optim.swa_utils.update_bn after training, which had '
    "the best mean in every case, or larger micro-batches, or GroupNorm (lightning_ga.models.to_group_norm)."
)


def batch_norm_layers(module: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers in training mode, by name; frozen layers are left out."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training}


def rescaled_momentum(momentum: float, factor: int) -> float:
    """Return the momentum per micro-batch that moves running statistics by ``momentum`` per window.

    Examples:
        >>> rescaled_momentum(0.19, 2)
        0.1
    """
    kept: float = (1 - momentum) ** (1 / factor)
    return round(1 - kept, 15)


class Momenta:
    """The momenta of a module's BatchNorm layers while they are rescaled; layers without momentum are left alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._kept = [(layer, layer.momentum) for layer in layers if layer.momentum is not None]

    def rescale(self, factor: int) -> None:
        """Set every layer's momentum for a factor."""
        for layer, momentum in self._kept:
            layer.momentum = rescaled_momentum(momentum, factor)

    def restore(self) -> None:
        """Restore the user's momenta."""
        for layer, momentum in self._kept:
            layer.momentum = momentum
