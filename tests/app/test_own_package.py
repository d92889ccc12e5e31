"""A package of the user's own, outside of the repository: it is trained as the package's own models are."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from command_lines import TINY
from PIL import Image

from lightning_ga.app.ckpt_path import find_checkpoint
from lightning_ga.app.run_files import read_run
from lightning_ga.checkpoints import read_safely

PROJECT = Path(__file__).parents[2] / "examples" / "own_project"
OWN = ("--config-dir", "conf", "model=regression", "data=diabetes")
BARE = (
    *("model=own", "model._target_=more.Worsens", "data=own", "data._target_=more.Numbers"),
    *("accumulate.verify=false", "trainer.accelerator=cpu"),
)
QUICK = ("accumulate.verify=false", "trainer.accelerator=cpu", "trainer.max_epochs=2")

MORE = '''
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric


class Line(LightningModule):
    """Its own optimizer."""

    def __init__(self, lr=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch["x"]).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log_dict({"val/mse": self.current_epoch + 1.0, "val/epoch": float(self.current_epoch)}, batch_size=4)

    def test_step(self, batch, batch_idx):
        self.log("test/epoch", float(self.trainer.current_epoch), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class Worsens(Line):
    """Its error grows from epoch to epoch."""


class Late(Line):
    def validation_step(self, batch, batch_idx):
        if self.current_epoch:
            super().validation_step(batch, batch_idx)


class Scored(Line):
    def on_train_epoch_end(self):
        self.log("train/epoch_score", self.current_epoch + 1.0)


class Quality(MeanMetric):
    higher_is_better = True


class Told(Line):
    """A metric of a name that nobody knows, of which the object knows its direction."""

    def __init__(self):
        super().__init__()
        self.quality = Quality()

    def validation_step(self, batch, batch_idx):
        self.quality.update(self.current_epoch + 1.0)
        self.log("val/strange", self.quality, batch_size=4)


class Numbers(LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader([{"x": torch.ones(2) * number} for number in range(8)], batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


class Sets(Numbers):
    def val_dataloader(self):
        return [self.train_dataloader(), self.train_dataloader()]
'''


@pytest.fixture
def typed(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Type a command line in a folder that holds the example's package, its ``conf``, and a module ``more``."""
    shutil.copytree(PROJECT, ".", dirs_exist_ok=True)
    Path("more.py").write_text(MORE)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(Path.cwd()))])

    def type_line(*arguments: str, folder: str = "run") -> Any:
        place = [] if {"-m", "--cfg"} & {*arguments} else [f"hydra.run.dir=outputs/{folder}"]
        return command(*arguments, *place, folder=folder)

    yield type_line
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_package", "more")]:
        del sys.modules[name]


def result(run: Any) -> dict[str, Any]:
    assert run.code == 0, run.err
    return json.loads((run.folder / "result.json").read_text())


def own_file(path: str, text: str) -> None:
    Path("conf", path).parent.mkdir(parents=True, exist_ok=True)
    Path("conf", path).write_text(text)


def best_epoch(run: Any) -> int:
    return read_safely(find_checkpoint("best", {}, [], own=run.folder))["epoch"]


def test_an_error_is_made_small(typed):
    """The best epoch is kept, tested and reported; early stopping stops what becomes worse."""
    run = typed(
        *BARE, "trainer.max_epochs=4", "callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=1"
    )
    found = result(run)
    assert (found["val/mse"], found["optimized_metric"], found["optimized_direction"]) == (1.0, "val/mse", "min")
    assert found["val/epoch"] == 0  # as that of the best
    assert "val/mse (smaller is better)" in run.out
    assert best_epoch(run) == 0
    assert "Epoch 2/4" in run.out
    assert "Epoch 3/4" not in run.out
    assert "Early stopping ended the training after epoch 2." in run.out


@pytest.mark.parametrize(
    ("arguments", "best", "said"),
    [
        (["model._target_=more.Told"], 1, "val/strange (larger is better)"),
        (["model._target_=more.Told", "optimized_direction=min"], 0, "val/strange (smaller is better)"),
        (["model._target_=more.Late", "trainer.max_epochs=3"], 1, "val/mse (smaller is better)"),
        (["callbacks.best.save_top_k=2"], 0, "val/mse (smaller is better)"),
        (["data._target_=more.Sets"], 0, "val/mse/dataloader_idx_0 (smaller is better)"),
    ],
)
def test_the_direction_is_typed_or_the_metrics_own(typed, arguments, best, said):
    """Also of a metric that the sanity check does not show."""
    run = typed(*BARE, "trainer.max_epochs=2", *arguments)
    assert run.code == 0, run.err
    assert said in run.out
    assert best_epoch(run) == best


@pytest.mark.parametrize("folder", ["run", "other"])
def test_a_resumed_run_keeps_its_best(typed, folder):
    """A worse epoch after a resume is not called the best, in whichever folder it goes on."""
    first = typed(*BARE, "trainer.max_epochs=2")
    resumed = typed(*BARE, "trainer.max_epochs=4", f"ckpt_path={first.folder}", folder=folder)
    assert result(resumed)["val/mse"] == 1.0
    assert best_epoch(resumed) == 0
    assert len(read_run(resumed.folder).curves["val/mse"]) == (4 if folder == "run" else 2)


def test_own_files_win(typed):
    """Over the package's of the same name, of which the others stay."""
    own_file("model/mlp.yaml", "_target_: more.Line\nlr: 0.5\n")
    own_file("trainer/default.yaml", "_target_: lightning.pytorch.Trainer\nmax_epochs: 77\naccelerator: cpu\n")
    shown = typed("--config-dir", "conf", "--cfg", "job", "model=mlp", "trainer=cpu", "optimizer=sgd")
    assert shown.code == 0, shown.err
    for part in ("more.Line", "max_epochs: 77", "torch.optim.SGD"):
        assert part in shown.out
    assert "MLPClassifier" not in shown.out
    run = typed("--config-dir", "conf", "model=mlp", "data=own", "data._target_=more.Numbers", "trainer.max_epochs=1")
    assert result(run)["val/mse"] == 1.0


def test_keys_that_the_model_does_not_read_are_refused(typed):
    """``optimizer.lr`` of a model that makes its own."""
    for words in (["optimizer.lr=0.5"], ["optimizer=sgd"], ["lr_scheduler=none"]):
        assert f"{words[0]} is read by nothing" in typed(*BARE, "+model.lr=0.1", *words).mistake


def test_a_standard_module_of_the_template_trains_and_goes_on(typed):
    """Its hyperparameters hold partials, which no checkpoint keeps; nothing has to be allowed.

    The page shows its own results.
    """
    run = typed(*OWN, *QUICK)
    assert run.code == 0, run.err
    assert run.err == "", "the form that the guide recommends needs no notice"
    saved = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"features": 10, "hidden": 32}
    page = (run.folder / "report.html").read_text()
    assert [name for name in ("test/mse", "test/r2", "val/mse") if f"<span>{name}</span>" not in page] == []
    assert "385 parameters" in run.out
    resumed = typed(*OWN, *QUICK, "trainer.max_epochs=3", "ckpt_path=last", folder="resumed")
    assert resumed.code == 0, resumed.err
    assert "Epoch 3/3" in resumed.out
    assert "Epoch 2/3" not in resumed.out


def test_a_metric_that_the_sanity_check_does_not_show_is_refused(typed):
    """Before anything is trained, with the nearest of those that are logged."""
    run = typed(*BARE, "trainer.max_epochs=2", "optimized_metric=val/msee")
    assert "optimized_metric=val/msee is not logged by validation, which logs val/mse, val/epoch" in run.mistake
    assert "write optimized_metric=val/mse" in run.mistake
    assert "Epoch" not in run.out


@pytest.mark.parametrize("said", ["val/msee is not logged by validation", "train/msee is not logged by training"])
def test_a_metric_that_may_begin_later_ends_nothing(typed, said):
    """A warning with those that are, as soon as they are known; no checkpoint is called the best."""
    late = ("trainer.num_sanity_val_steps=0", f"optimized_metric={said.split()[0]}")
    run = typed(*BARE, "trainer.max_epochs=2", *late, "callbacks=[default,early_stopping]")
    assert run.code == 0, run.err
    assert run.err.count(f"{said}, which logs val/mse") == 1
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {"last.ckpt"}
    assert "Epoch 2/2" in run.out


def test_a_metric_that_the_module_logs_at_the_end_of_an_epoch_is_that_epochs(typed):
    """In the line of the epoch, and for checkpoints and early stopping, from the first epoch on."""
    arguments = ("optimized_metric=train/epoch_score", "optimized_direction=min", "callbacks=[default,early_stopping]")
    run = typed(*BARE, "model._target_=more.Scored", "trainer.max_epochs=2", *arguments)
    assert run.code == 0, run.err
    assert "is not logged" not in run.err
    for epoch in (1, 2):
        assert f"Epoch {epoch}/2: train epoch_score {epoch}.0000" in run.out
    assert best_epoch(run) == 0


def test_classes_are_named_on_the_line(typed):
    run = typed(*BARE, "trainer.max_epochs=1", "+model.lr=0.5", "+data.batch_size=2")
    assert run.code == 0, run.err
    last = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert (last["hyper_parameters"]["lr"], last["global_step"]) == (0.5, 4)
    data = ("data=own", "data._target_=more.Numbers", "accumulate.verify=false")
    for model in ("resnet34d", "own"):  # the keys of the first stay
        merged = typed(f"model={model}", "model._target_=more.Line", *data, "+model.nope=1", folder=f"merged_{model}")
        assert ("add model=own" in merged.mistake) is (model != "own")


def test_null_leaves_a_part_out(typed):
    null = (f"{name}=null" for name in ("logger", "callbacks", "optimized_metric", "accumulate"))
    assert result(typed(*BARE[:4], "trainer.accelerator=cpu", "trainer.max_epochs=1", *null))["val/mse"] == 1.0


def test_own_keys_are_the_users_business_and_reach_the_loggers(typed):
    """With the number of parameters; values of the environment do not."""
    own_file("experiment/mine.yaml", "# @package _global_\ntags: [a, b]\ntask_name: x\nextras: {print: true}\n")
    run = typed("--config-dir", "conf", "experiment=mine", *BARE, "trainer.max_epochs=1", "+mine=${oc.env:HOME}")
    assert run.code == 0, run.err
    assert "a, b" in (run.folder / "report.html").read_text()
    kept = (run.folder / "csv" / "hparams.yaml").read_text()
    assert "more.Worsens" in kept
    assert "parameters: 3" in kept
    assert str(Path.home()) not in kept


def test_groups_of_ones_own_are_read(typed):
    """No warning of their words, nor of the values of options."""
    own_file("hparams_search/two.yaml", "# @package _global_\ntrainer: {max_epochs: 1}\n")
    own_file("mine/quick.yaml", "rate: 0.5\n")
    own_file("train_mine.yaml", "defaults: [train, mine: quick, optional hparams_search: null, _self_]\n")
    line = ("--config-dir", "conf", "--config-name", "train_mine", "mine=quick", "hparams_search=two")
    run = typed(*line, *BARE, "+note=x", "dry_run=true")
    assert run.code == 0, run.err
    assert run.err.count("is read by nothing") == 1
    assert "+note=x is read by nothing" in run.err
    assert typed("--config-name", "train", *BARE, "dry_run=true", folder="named").err == ""


def test_the_file_of_a_machine_is_read_after_the_experiment(typed):
    own_file("local/default.yaml", "# @package _global_\ntrainer: {max_epochs: 77}\n")
    own_file("experiment/mine.yaml", "# @package _global_\ntrainer: {max_epochs: 5}\n")
    line = ("--config-dir", "conf", "experiment=mine", *BARE, "--cfg", "job")
    assert "max_epochs: 77\n" in typed(*line).out
    assert "max_epochs: 6\n" in typed(*line, "trainer.max_epochs=6").out


MISTAKES = [
    (["model.scheduler={_target_:torch.optim.lr_scheduler.CosineAnnealingLR,T_max:9}"],
     "model.scheduler has no T_max, but"),
    (["model.optimizer.lrr=1"], "did you mean model.optimizer.lr?"),
    (["optimizer.lr=0.1"], "optimizer.lr=0.1 is read by nothing"),
    (["model.lr=0.1"], "There is no key model.lr. To add it, write +model.lr=0.1."),
    (["+model.hiden=3"], "did you mean hidden?"),
    (["model.hidden=big"], "Regression takes a whole number as hidden."),
    (["model.optimizer.lr=fast"], "AdamW takes a number as lr."),
    (["model._target_=my_package.module.Regresion"], "did you mean my_package.module.Regression?"),
    (["~model.features"], "model.features is missing, which Regression needs: add +model.features=VALUE."),
    (["model.optimizer._partial_=false"], "add +model.optimizer._partial_=true"),
    (["~model.scheduler", "+model.scheduler={_target_:torch.optim.lr_scheduler.CosineAnnealingLR,_partial_:true}"],
     "CosineAnnealingLR needs 'T_max', which its section does not give: add +KEY.NAME=VALUE where _target_ is"),
    (["optimized_metric=val/acc"], "which logs val/mse, val/r2: write optimized_metric=val/"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "answer"), MISTAKES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_mistake_about_ones_own_class_is_answered(typed, words, answer):
    """By the key that was typed, and what the class takes; nothing is trained."""
    run = typed(*OWN, *QUICK, *words)
    assert answer in run.mistake
    assert "Epoch" not in run.out


def test_a_mapping_is_replaced_as_the_sentence_says(typed):
    """Both words on one line: the file's own keys are gone."""
    said = typed(*OWN, *QUICK, "model.optimizer={_target_:torch.optim.SGD,_partial_:true,momentum:0.5,lr:0.1}").mistake
    words = said.partition("write ")[2].rstrip(".").replace("'", "").split()
    assert result(typed(*OWN, *QUICK, *words))["val/mse"] > 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("trainer: {max_epochs: 1}", "begin its file with # @package _global_."),
        ("# @package _global_\ntrainer: {max_epochs: three}", "Trainer takes a whole number or null as max_epochs."),
        ("# @package _global_\ntrainer: {max_epoch: 3}", "did you mean max_epochs?"),
        ("# @package _global_\ndefaults: [/model: regression]", "or in a file override /model."),
    ],
)
def test_a_mistake_in_a_file_is_answered(typed, text, answer):
    own_file("experiment/mine.yaml", f"{text}\n")
    assert answer in typed(*OWN, *QUICK[:2], "experiment=mine").mistake


def test_a_section_of_a_file_that_is_mistyped_is_told(typed):
    """It may be a key of one's own, so the run continues."""
    own_file("experiment/mine.yaml", "# @package _global_\ntrainre: {max_epochs: 1}\n")
    run = typed(*OWN, *QUICK, "experiment=mine", "dry_run=true")
    assert "trainre in a configuration file is read by nothing: did you mean trainer?" in run.err


def test_keys_that_a_train_yaml_of_ones_own_lacks_are_added(typed):
    """As lightning-hydra-template's lacks those of this package; its own ``train`` is refused."""
    own_file(
        "train.yaml",
        "defaults: [_self_, model: regression, data: diabetes, trainer: cpu, accumulate: auto]\ntrain: true\n",
    )
    own_file("trainer/cpu.yaml", "_target_: lightning.pytorch.Trainer\naccelerator: cpu\n")
    line = ("--config-dir", "conf")
    assert "write +optimized_metric=val/mse." in typed(*line, "optimized_metric=val/mse").mistake
    assert "write +task=test ckpt_path=best." in typed(*line, "train=false").mistake


def test_the_callback_of_the_guide_saves_samples(typed):
    """A grid of the first test batch, eight a row, in the folder of the run."""
    for block in pages.blocks(pages.DOCS / "guide" / "command-line.md"):
        if "save_samples" in block.remark:
            path = Path(block.remark.removeprefix("file: "))
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
    run = typed(*TINY, "--config-dir", "conf", "callbacks=[default,save_samples]")
    assert run.code == 0, run.err
    with Image.open(run.folder / "samples.png") as image:
        assert image.size == (8 * 34 + 2, 8 * 34 + 2)
        low, high = image.convert("L").getextrema()
    assert low < 50 < 200 < high


@pytest.mark.slow
def test_the_readme_of_the_example_runs(typed):
    lines = [line for line in Path("README.md").read_text().splitlines() if line.startswith("lightning-ga ")]
    assert len(lines) == 5
    for number, line in enumerate(lines):
        quick = "trainer.max_epochs=2" if number == 0 else "accumulate.verify=false"
        run = typed(*line.split()[1:], quick, folder=str(number))
        assert run.code == 0, f"{line}: {run.err}"
