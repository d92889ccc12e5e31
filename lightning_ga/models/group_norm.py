"""Replace BatchNorm by GroupNorm: the same network, with independent samples."""

import math
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def to_group_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm layer by a GroupNorm layer, in place, and return the module.

    GroupNorm normalizes each sample by itself, so that micro-batches give exactly the gradient of the whole batch.
    Scale and shift parameters are kept; running statistics have no counterpart, so weights that were trained with
    BatchNorm need training again. Activations and dropout that timm fuses into its BatchNorm layers stay.

    Args:
        module: A module, before its optimizer is made.
        groups: Number of groups of channels; reduced to its greatest common divisor with the number of
            channels. ``BatchNorm1d`` becomes one group: its input may hold one value a channel, and a value
            normalized by itself is lost.

    Returns:
        The module; a new one if it is a BatchNorm layer itself.

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
    number = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(groups, channels)
    norm = nn.GroupNorm(number, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias  # frozen ones stay so
    norm.train(layer.training)
    # timm's BatchNormAct2d: normalization, dropout and activation in one layer.
    fused = [cast(nn.Module, getattr(layer, name)) for name in ("drop", "act") if hasattr(layer, name)]
    kept = [part for part in fused if not isinstance(part, nn.Identity)]
    return nn.Sequential(norm, *kept) if kept else norm
