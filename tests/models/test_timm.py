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


@pytest.mark.parametrize(
    ("setting", "value", "reason"), [("HF_HUB_OFFLINE", True, "offline"), ("ENDPOINT", "http://127.0.0.1:9", "refused")]
)
def test_weights_that_cannot_be_fetched(monkeypatch, tmp_path, setting, value, reason):
    """One request tells why; the hub itself would wait, and try again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(f"huggingface_hub.constants.{setting}", value)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to try again"))
    sentence = rf"model\.pretrained=true of 'resnet10t' could not be fetched \(.*{reason}.*\): .*model\.init_from=PATH"
    with pytest.raises(UserError, match=sentence):
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
