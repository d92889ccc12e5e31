"""Optimizers of timm on the command line: its parameter groups, under schedules of PyTorch."""

from functools import partial

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from lightning_ga import UserError
from lightning_ga.models import TimmClassifier, timm_optimizer
from lightning_ga.models.schedules import warmup_cosine

SMALL = {"img_size": 32, "patch_size": 16, "num_classes": 3}


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SMALL)


def trained(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step) -> list[torch.Tensor]:
    """The parameters after four steps, with a schedule that is stepped after each."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for number in range(1, 5):
        net(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
    return [*net.parameters()]


@pytest.mark.parametrize("layer_decay", [None, 0.75])
def test_training_is_that_of_timm(layer_decay):
    """timm's optimizer with timm's schedule gives the same weights: no decay of norms and biases, layer decay."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": layer_decay}
    theirs, ours = network(), network()
    optimizer = create_optimizer_v2(theirs, "lamb", **settings)
    cosine = CosineLRScheduler(optimizer, t_initial=8, warmup_t=0, t_in_epochs=False)
    expected = trained(theirs, optimizer, cosine.step_update)
    optimizer = timm_optimizer(ours, name="lamb", **settings)
    schedule = warmup_cosine(optimizer, 8)
    found = trained(ours, optimizer, lambda number: schedule.step())
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(expected, found, strict=True))
    rates = {group["lr"] for group in optimizer.param_groups}
    assert (len(rates) > 5) == (layer_decay is not None)


def test_the_models_of_the_package_pass_their_network():
    """Of which timm knows the order of layers; all parameters are trained."""
    make = partial(timm_optimizer, name="sgd", lr=0.1, weight_decay=0.1, layer_decay=0.5)
    model = TimmClassifier("resnet10t", optimizer=make)
    optimizer = model.configure_optimizers()
    sizes = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    assert sizes == sum(one.numel() for one in model.parameters())
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    assert len({group["lr"] for group in optimizer.param_groups}) == 6  # the stem, four stages, the head
    assert all("lr_scale" not in group for group in optimizer.param_groups)


def test_parameters_in_place_of_a_module_are_refused():
    with pytest.raises(UserError, match=r"call it with the module, optimizer\(self\)"):
        timm_optimizer(torch.nn.Linear(1, 1).parameters())


def test_epochs_of_warmup_are_a_share_of_the_run():
    """The factors are those of the share; both kinds at once, and more epochs than there are, are refused."""
    factors = []
    for warmup in ({"warmup": 0.25}, {"warmup_epochs": 5, "epoch_steps": 2}):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)
        schedule = warmup_cosine(optimizer, 40, **warmup)
        factors.append([schedule.lr_lambdas[0](step) for step in range(41)])
    assert factors[0] == factors[1]
    for wrong in ({"warmup": 0.1, "epoch_steps": 2}, {"epoch_steps": 10}, {}):
        with pytest.raises(UserError, match="warmup_epochs=5 must be at most"):
            warmup_cosine(optimizer, 40, warmup_epochs=5, **wrong)
