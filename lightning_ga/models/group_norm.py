"""GroupNorm layers in place of BatchNorm layers: accumulation is exact with them."""

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def to_group_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm layer by a GroupNorm layer, in place, and return the module.

    GroupNorm normalizes each sample by itself, so that micro-batches give exactly the gradient of the whole batch.
    Scale and shift parameters are kept; running statistics have no counterpart, so weights that were trained with
    BatchNorm need training again. Activations and dropout that timm fuses into its BatchNorm layers stay.

    Args:
        module: A module, before its optimizer is made. A BatchNorm layer itself is not changed, and a new one returned.
        groups: Number of groups of channels; reduced to its greatest common divisor with the number of
            channels. ``BatchNorm1d`` becomes one group: with one value a channel, a normalized value would be lost.

    Examples:
        >>> to_group_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
        16
    """
    if isinstance(module, _BatchNorm):
        return _replacement(module, groups)
    for name, child in module.named_children():
        setattr(module, name, to_group_norm(child, groups))
    return module


def _replacement(layer: _BatchNorm, groups: int) -> nn.Module:
    channels = layer.num_features
    if isinstance(layer, nn.BatchNorm1d):
        groups = 1
    norm = nn.GroupNorm(math.gcd(groups, channels), channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight = layer.weight  # a frozen one stays so
        norm.bias = layer.bias
    norm.train(layer.training)
    kept = []
    for name in ("drop", "act"):  # of timm's BatchNormAct2d
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module) and not isinstance(part, nn.Identity):
            kept.append(part)
    return nn.Sequential(norm, *kept) if kept else norm
