"""Which BatchNorm layers of a model normalize by the samples of a micro-batch (ghost batch normalization)."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_layers(module: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers in training mode, by name; frozen layers are left out."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training}
