import pytest
import timm
import torch

from lightning_ga import UserError
from lightning_ga.models import TimmClassifier


def test_a_model_takes_images_of_any_size():
    model = TimmClassifier("vit_tiny_patch16_224", num_classes=7, in_channels=1, image_size=32)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_an_unknown_name_or_tag_shows_the_nearest():
    for name, nearest in {"resnet34dd": "resnet34d", "resnet34d.ra2_in2k": "resnet34d.ra2_in1k"}.items():
        with pytest.raises(UserError, match=rf"nearest names: .*{nearest}\b"):
            TimmClassifier(name)


def test_weights_that_cannot_be_fetched(monkeypatch, tmp_path):
    """The hub's own reason, and what to do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'resnet10t' could not be fetched \(.+\): .*model\.pretrained=false"):
        TimmClassifier("resnet10t", pretrained=True)


def test_loading_a_checkpoint_fetches_nothing(monkeypatch):
    """And builds the same layers."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **rest: create(name, **rest))
    model = TimmClassifier("resnet10t", pretrained=True, group_norm=True)
    assert model.hparams["pretrained"] is False
    assert not [layer for layer in model.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
    assert TimmClassifier(**model.hparams).load_state_dict(model.state_dict())
