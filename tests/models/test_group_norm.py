"""GroupNorm in place of BatchNorm."""

import timm
import torch
from torch import nn

from lightning_ga.models import to_group_norm


def test_the_gradient_of_halves_is_that_of_the_whole():
    """Of a timm network with activations that are fused into its BatchNorm layers."""
    torch.manual_seed(0)
    net = to_group_norm(timm.create_model("mobilenetv3_small_050", num_classes=3, drop_rate=0.0)).double()
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.modules())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)

    def gradient(batch):
        net.zero_grad()
        net(batch).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    whole, halves = gradient(images), (gradient(images[:2]) + gradient(images[2:])) / 2
    assert float((whole - halves).norm() / whole.norm()) <= 1e-12


def test_scale_and_shift_are_taken_over():
    """One value a channel is not normalized by itself: it would be lost."""
    layer = nn.BatchNorm2d(48)
    nn.init.normal_(layer.weight)
    norm = to_group_norm(layer)
    assert (norm.num_groups, norm.weight is layer.weight) == (16, True)
    assert to_group_norm(nn.BatchNorm1d(7, affine=False)).weight is None
    torch.manual_seed(0)  # of two channels, only the order is left: in few samples all may have the same
    for channels in (2, 16, 64):
        outputs = to_group_norm(nn.BatchNorm1d(channels, affine=False))(torch.randn(16, channels))
        assert float(outputs.std(0).min()) > 1e-3
