from functools import partial
from pathlib import Path

import pytest
import torch
from command_lines import TINY
from lightning.pytorch import LightningModule

from lightning_ga.app.export import save_weights
from lightning_ga.checkpoints import read_safely
from lightning_ga.models import Classifier, MLPClassifier
from lightning_ga.models.timm import TimmClassifier


class Own(LightningModule):
    """A network and a partial among its hyperparameters."""

    def __init__(self, optimizer, width: int, *, dtype=torch.float32, **others):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)


def loaded(code: str) -> torch.nn.Module:
    """What the lines make, with nothing but what is in the current folder."""
    namespace: dict = {}
    exec(code, namespace)
    return namespace["model"]


@pytest.mark.parametrize("options", [{}, {"drop_rate": 0.1}])
@pytest.mark.parametrize(
    ("name", "group_norm"),
    [("mobilenetv3_small_050", False), ("mobilenetv3_small_050", True), ("vit_tiny_patch16_224", False)],
)
def test_a_timm_network_is_loaded_by_timm_alone(tmp_path, monkeypatch, name, group_norm, options):
    """By its name, in four lines; one with GroupNorm in place of BatchNorm by this package."""
    monkeypatch.chdir(tmp_path)
    model = TimmClassifier(name, num_classes=3, in_channels=1, image_size=32, group_norm=group_norm, options=options)
    code = save_weights(tmp_path, model, {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)})
    assert (f"timm.create_model(model_name='{name}'" in code) == ("lightning_ga" not in code) == (not group_norm)
    assert len(code.splitlines()) == 4
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(loaded(code).eval()(images), model.eval()(images))


def test_a_module_is_loaded_without_a_trainer(tmp_path, monkeypatch):
    """With its hyperparameters; ``Ellipsis`` stands for those that no checkpoint keeps."""
    monkeypatch.chdir(tmp_path)
    model = Own(partial(torch.optim.SGD, lr=0.1), 2, unused=1)
    kept = {"width": 2, "dtype": torch.float64}
    code = save_weights(tmp_path, model, {"state_dict": model.state_dict(), "hyper_parameters": kept})
    assert "Own(optimizer=Ellipsis, width=2, dtype=torch.float64, unused=Ellipsis)" in code
    assert torch.equal(loaded(code).net.weight, model.net.weight)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(Path("weights.pt")) == []


def test_required_arguments_that_are_no_hyperparameters_are_to_be_put_in(tmp_path, monkeypatch):
    """The network of a ``Classifier`` and its number of classes: with them, the lines run."""
    monkeypatch.chdir(tmp_path)
    model = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), 3)
    code = save_weights(tmp_path, model, {"state_dict": model.state_dict()})
    assert "Classifier(net=Ellipsis, num_classes=Ellipsis)" in code
    net = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))"
    completed = code.replace("net=Ellipsis", f"net={net}").replace("Ellipsis", "3")
    assert torch.equal(loaded(completed).net[1].weight, model.net[1].weight)


def test_weights_of_another_model_are_not_exported(command, shared):
    """The lines that load them would be wrong."""
    shared(*TINY, folder="trained")
    line = ("model=mlp", "model.hidden=[16]", "task=export", "ckpt_path=outputs/trained")
    assert "ckpt_path= is of another model than this MLPClassifier" in command(*line).mistake
    assert not Path("outputs/run/weights.pt").exists()


def test_export_writes_the_best_weights_of_a_run(command, shared):
    """And nothing else; the lines that load them are printed, kept and shown on the page."""
    trained = shared(*TINY, folder="trained")
    run = command(*TINY[:2], "task=export", "ckpt_path=outputs/trained", folder="exported")
    assert run.code == 0, run.err
    weights, best = (
        torch.load(run.folder / "weights.pt", weights_only=True),
        read_safely(trained.folder / "checkpoints" / "best.ckpt"),
    )
    assert weights.keys() == best["state_dict"].keys()
    assert all(torch.equal(weights[name], best["state_dict"][name]) for name in weights)
    code = (run.folder / "load_weights.py").read_text()
    assert isinstance(loaded(code.replace("weights.pt", str(run.folder / "weights.pt"))), MLPClassifier)
    page = (run.folder / "report.html").read_text()
    for line in code.splitlines():
        assert line in run.out
        assert line.replace("'", "&#39;").replace('"', "&#34;") in page, line
