import pytest
import timm
import torch

from lightning_ga import UserError
from lightning_ga.models import TimmClassifier


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_any_timm_model_takes_images_of_any_size(name):
    model = TimmClassifier(name, num_classes=7, in_channels=1, image_size=32)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "nearest"), [("resnet34dd", "resnet34d"), ("resnet34d.ra2_in2k", "resnet34d.ra2_in1k")]
)
def test_an_unknown_name_shows_the_nearest(name, nearest):
    with pytest.raises(UserError, match="nearest names") as caught:
        TimmClassifier(name)
    assert nearest in str(caught.value)


def test_weights_that_cannot_be_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"model\.pretrained=true of 'resnet10t'"):
        TimmClassifier("resnet10t", pretrained=True)


def test_weights_are_not_tried_for_again_without_a_network(monkeypatch, tmp_path):
    """The hub would wait between its attempts; one request tells, and its error is shown."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to try again"))
    with pytest.raises(UserError, match=r"could not be fetched \(.*refused.*\): .*model\.init_from=PATH"):
        TimmClassifier("resnet10t", pretrained=True)


def test_loading_a_checkpoint_fetches_nothing(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **rest: create(name, **rest))
    model = TimmClassifier("resnet10t", pretrained=True)
    assert model.hparams["pretrained"] is False


def test_group_norm_is_kept_in_a_checkpoint():
    model = TimmClassifier("resnet10t", group_norm=True)
    assert not [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    again = TimmClassifier(**model.hparams)
    assert again.load_state_dict(model.state_dict())
