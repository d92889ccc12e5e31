"""Nothing is ignored in silence: each test types a line as a newcomer would, and reads what is said."""

import csv
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from command_lines import TINY

from lightning_ga.app.progress import quiet_lightning


def own_experiment(text: str) -> tuple[str, ...]:
    path = Path("mine/experiment/small.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return "--config-dir", "mine", "experiment=small", "model=mlp"


def test_an_experiment_without_its_first_line_is_told(command):
    run = command(*own_experiment("data:\n  batch_size: 7\n"))
    assert "does not begin with the line '# @package _global_'" in run.mistake


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["hydra.run.dir="], 'hydra.run.dir="" must be the path of a folder; for example hydra.run.dir=outputs'),
        (["-m", "seed=1", "hydra.sweep.dir="], 'hydra.sweep.dir="" must be the path of a folder'),
        (["hydra.run.dir=run", "trainer.num_nodes=2"], "trainer.num_nodes=2 would wait for nodes that nothing starts"),
    ],
)
def test_what_starts_nothing_is_told(command, line, words):
    """And leaves no file behind."""
    run = command(*line, *TINY)
    assert run.mistake.startswith(f"Error: {words}")
    assert not list(Path().iterdir())


def test_warnings_are_their_sentences():
    """Without the file and the line that they come from."""
    with quiet_lightning():
        assert warnings.formatwarning("It is odd.", UserWarning, "file.py", 3) == "Warning: It is odd.\n"
    assert "file.py" in warnings.formatwarning("It is odd.", UserWarning, "file.py", 3)


@pytest.mark.parametrize("setting", ["trainer.check_val_every_n_epoch=2", "trainer.limit_val_batches=0"])
def test_a_training_without_validation_is_told(command, setting):
    """There is no best checkpoint: what is tested are the last weights."""
    run = command(*TINY, setting)
    assert run.code == 0, run.err
    assert run.err.startswith(
        "Warning: val/acc was never measured, so there is no best checkpoint, and a test is of the "
    )
    assert len(run.err.strip().splitlines()) == 1
    assert not (run.folder / "checkpoints" / "best.ckpt").exists()


def test_a_home_folder_is_never_made_beside_a_run(command, monkeypatch, tmp_path):
    """Typed, quoted, or in a file of one's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = "# @package _global_\npaths:\n  output_root: ~/runs\n"
    for given in (["paths.output_root=~/runs"], ["paths.output_root='~/runs'"], own_experiment(text)):
        run = command(*TINY, *given, "dry_run=true", "hydra.run.dir='${home:${paths.output_root}}'")
        assert run.code == 0, run.err
        assert (tmp_path / "home" / "runs" / "plan.json").is_file()
        shutil.rmtree(tmp_path / "home")
    assert not Path("~").exists()


def test_a_result_that_is_no_number_is_told(command):
    run = command(*TINY, "optimizer.lr=1e20")
    assert run.code == 0
    assert "val/loss are not finite" in run.err or "val/loss is not finite" in run.err
    assert json.loads((run.folder / "result.json").read_text(), parse_constant=pytest.fail)["val/loss"] is None


def test_the_checkpoint_that_was_taken_is_told_with_what_differs(command, shared):
    """Which file of which run, how far it came, and where this run is another one."""
    first = shared(*TINY, folder="first")
    run = command(*TINY[:-2], "trainer.max_epochs=2", "ckpt_path=last", "data.batch_size=16", folder="second")
    path = first.folder / "checkpoints" / "last.ckpt"
    assert f"Checkpoint: {path.relative_to(Path.cwd())} (epoch 1, 4 optimizer steps)" in run.out.splitlines()
    assert (
        "Warning: This run is not as the one that wrote the checkpoint: data.batch_size (32 then, 16 now)." in run.err
    )
    same = command(*TINY, "task=test", f"ckpt_path={first.folder}", folder="third")
    assert f"Checkpoint: {first.folder / 'checkpoints' / 'best.ckpt'}" in same.out
    assert same.err == ""


def test_a_training_starts_from_bare_weights(command, shared):
    """With their numbers; a last layer for other classes is left as it was drawn, and named."""
    first = shared(*TINY, folder="first")
    path = first.folder / "checkpoints" / "best.ckpt"
    trained = json.loads((first.folder / "result.json").read_text())
    weights = torch.load(path, weights_only=True)["state_dict"]
    torch.save({name.removeprefix("net."): value for name, value in weights.items()}, "weights.pt")
    run = command(*TINY, "task=test", "model.init_from=weights.pt", folder="second")
    assert run.code == 0, run.err
    assert "Weights: 4 of 4 from weights.pt" in run.out
    assert json.loads((run.folder / "result.json").read_text())["test/acc"] == trained["test/acc"]
    wider = command(*TINY, f"model.init_from={path}", "model.num_classes=12", folder="third")
    assert "Weights: 2 of 4 from" in wider.out
    assert "2 keep their first values: 3.bias, 3.weight" in wider.out
    none = command(*TINY, "model.init_from=weights.pt", "model.hidden=[9]", "model.num_classes=12")
    assert none.code == 1
    assert "is one of this model" not in none.out


def test_predictions_name_classes_and_probabilities(command, shared):
    """One row a sample; the probabilities of all classes add up to one."""
    shared(*TINY, folder="first")
    run = command(*TINY, "task=predict", "ckpt_path=best", folder="second")
    with (run.folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 360
    for row in rows:
        assert row["class"] == row["prediction"]
        assert row["probability"] == row[f"p({row['class']})"]
        assert sum(float(value) for name, value in row.items() if name.startswith("p(")) == pytest.approx(1, abs=1e-4)


def test_what_an_experiment_builds_is_resolved_once(command, monkeypatch):
    """A variable that seeding sets cannot change a target between the check and the build."""
    monkeypatch.delenv("PL_GLOBAL_SEED")
    target = "${oc.env:PL_GLOBAL_SEED,lightning.pytorch.callbacks.Timer}"
    text = f"# @package _global_\ncallbacks:\n  x:\n    _target_: {target}\n"
    run = command(*own_experiment(text), *TINY[1:], "hydra.run.dir=run")
    assert run.code == 0, run.err


def test_no_best_checkpoint_is_missed_that_was_not_to_be_kept(command):
    run = command(*TINY, "trainer.fast_dev_run=true")
    assert (run.code, run.err) == (0, "")
