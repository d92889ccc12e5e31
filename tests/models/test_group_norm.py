"""One call makes a network's samples independent of one another."""

import pytest
import timm
import torch
from torch import nn

from lightning_ga.models import to_group_norm


@pytest.mark.parametrize("name", ["resnet34d", "mobilenetv3_small_050"])
def test_the_gradient_of_halves_is_that_of_the_whole(name: str) -> None:
    """For any timm network, activations fused into its BatchNorm layers included."""
    torch.manual_seed(0)
    net = to_group_norm(timm.create_model(name, num_classes=3, drop_rate=0.0)).double()
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.modules())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)

    def gradient(batch: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        net(batch).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    whole, halves = gradient(images), (gradient(images[:2]) + gradient(images[2:])) / 2
    assert float((whole - halves).norm() / whole.norm()) <= 1e-12


def test_scale_and_shift_are_taken_over() -> None:
    layer = nn.BatchNorm2d(48)
    nn.init.normal_(layer.weight)
    norm = to_group_norm(layer)
    assert torch.equal(norm.weight, layer.weight)
    assert norm.num_groups == 16
    assert to_group_norm(nn.BatchNorm1d(7, affine=False)).weight is None


@pytest.mark.parametrize("channels", [2, 16, 64])
def test_one_value_a_channel_is_not_normalized_by_itself(channels: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = to_group_norm(nn.BatchNorm1d(channels))(torch.randn(4, channels))
    assert float(outputs.std(0).min()) > 1e-3
