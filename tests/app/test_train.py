import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_lines import TINY as EPOCH
from forks import forked

from lightning_ga.models.classifier import Classifier

SMALL = ("model=mlp", "model.hidden=[32]")
QUICK = (*SMALL, "trainer.max_epochs=2", "trainer.accelerator=cpu", "accumulate.micro_batch_size=16")
TINY = (*EPOCH, "trainer.max_epochs=2")


def result(folder: Path) -> dict[str, float]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def quick(shared):
    """A run of two epochs with nothing out of the ordinary."""
    return shared(*QUICK, folder="fit")


def test_a_run_leaves_everything_to_read(quick):
    """Config, plan, logs by optimizer step, the page, a report per class, best and last checkpoint."""
    assert quick.code == 0
    assert quick.err == ""
    files = {str(path.relative_to(quick.folder)) for path in quick.folder.rglob("*") if path.is_file()}
    left = "config.yaml plan.json result.json report.html classification_report.txt classification_report.json"
    assert {*left.split(), "csv/metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"} <= files
    assert any(name.startswith("tensorboard/events") for name in files)
    plan = json.loads((quick.folder / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["factor"], plan["micro_batch_size"]) == (32, 2, 16)


def test_the_plan_is_printed_first_and_the_result_last(quick):
    """Where there is no terminal, an epoch is one line, of any length."""
    lines = quick.out.strip().splitlines()
    assert lines[0] == "Optimized metric: val/loss (smaller is better)"
    assert lines[1] == "Plan"
    assert "32 = 16 × 2 × 1 (micro-batch × factor × ranks)" in lines[3]
    assert lines[-2].startswith("Result after ")
    assert "test/acc" in lines[-2]
    epochs = [line for line in lines if line.startswith("Epoch")]
    assert [line.split(":")[0] for line in epochs] == ["Epoch 1/2", "Epoch 2/2"]
    assert all("train loss" in line and "val loss" in line and line.endswith("samples/s") for line in epochs)
    assert "\r" not in quick.out
    assert (quick.folder / "train.log").read_text() == quick.out


@pytest.mark.parametrize(("progress", "shown"), [("bar", "it/s"), ("none", "Result")])
def test_progress_is_shown_as_was_asked_for(command, progress, shown):
    """A bar, or nothing."""
    run = command(*TINY, f"progress={progress}")
    assert run.code == 0, run.err
    assert shown in run.out
    assert ("Epoch 2/2: train loss" in run.out) == (progress != "none")
    log = (run.folder / "train.log").read_text()
    assert log.count("Epoch 1/2: train loss") == (progress != "none")
    assert "\r" not in log


def test_a_seed_decides_the_run(command, shared):
    first, again, other = shared(*EPOCH), command(*EPOCH, folder="again"), command(*EPOCH, "seed=2", folder="other")
    strip = [{k: v for k, v in result(run.folder).items() if k != "seconds"} for run in (first, again, other)]
    assert strip[0] == strip[1] != strip[2]


@pytest.mark.filterwarnings("default:Memory ran out")
def test_a_run_that_survived_says_so_at_its_end(command, shared, monkeypatch):
    """How often memory ran out, on the screen and in ``result.json``; nothing where it never did."""
    smooth = shared(*TINY, folder="smooth")
    whole = Classifier.training_step

    def at_most_eight(module, batch, batch_idx):
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(module, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", at_most_eight)
    run = command(*TINY)
    assert "Warning: Memory ran out in training" in run.err
    assert result(run.folder)["oom_events"] == 1
    assert "Survived 1 out-of-memory error: see the warnings above." in run.out.splitlines()
    assert result(run.folder)["val/loss"] == pytest.approx(result(smooth.folder)["val/loss"], rel=1e-4)
    assert "Survived" not in smooth.out
    assert "oom_events" not in result(smooth.folder)


def test_a_run_has_a_name_and_tags(command):
    """In the folder's name, in the configuration, which trackers are built from, and on the page."""
    run = command(*TINY, "run.name=../first", "tags=[small,tried]", "hydra.run.dir='x${named:${run.name}}'")
    assert run.code == 0, run.err
    page = Path("x-.._first", "report.html").read_text()
    assert "first" in page
    assert "small, tried" in page
    line = "--cfg job -p logger logger=[wandb,mlflow] run.name=first tags=[a] --resolve"
    trackers = command(*line.split())
    assert all(word in trackers.out for word in ("name: first", "run_name: first", "- a"))


@pytest.mark.slow
def test_resnet34d_learns_the_digits(command):
    """One epoch of small pictures reaches 72 % of the test set, of ten classes; the main job trains four of larger."""
    run = command("model=resnet34d", "data.image_size=16", "trainer.max_epochs=1")
    assert run.code == 0, run.err
    assert result(run.folder)["test/acc"] >= 0.5


def test_help_shows_examples_groups_and_keys(command):
    """All that a newcomer needs."""
    run = command("--help")
    assert run.code == 0
    assert not Path("outputs").exists()
    for part in ("accumulate.memory_budget=", "model: gpt, hashed_patches, mlp,", "best|FOLDER|PATH", "--config-dir"):
        assert part in run.out
    assert [line for line in run.out.splitlines() if len(line) > 80 and ": " not in line.split("  ")[0]] == []


def test_best_is_tested_validated_and_predicted_with(command, quick):
    """The other tasks take the best checkpoint of the latest run and repeat its numbers."""
    trained = result(quick.folder)
    tested = result(command(*SMALL, "task=test", "ckpt_path=best", folder="test").folder)
    assert tested["test/acc"] == trained["test/acc"]
    validated = result(command(*SMALL, "task=validate", "ckpt_path=best", folder="validate").folder)
    assert validated["val/acc"] == trained["val/acc"]
    predicted = command(*SMALL, "task=predict", "ckpt_path=best", folder="predict").folder / "predictions.npz"
    assert np.load(predicted)["class_probabilities"].shape == (360, 10)
    assert not [*Path("outputs").glob("[tvp]*/checkpoints/*")]  # a later best would be looked for there


def as_module(*arguments: str) -> None:
    """What ``python -m lightning_ga.train`` does, without importing anew."""
    sys.argv[1:] = arguments
    runpy.run_module("lightning_ga.train", run_name="__main__", alter_sys=True)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_share_an_effective_batch(tmp_path):
    """trainer=ddp starts a process for the second rank; one of them prints, both train the same 32 samples a step.

    What is told of training is a mean over both.
    """
    arguments = [*EPOCH, "trainer=ddp", "data.batch_size=16", "accumulate.micro_batch_size=8", "hydra.run.dir=run"]
    environment = {"PYTHONWARNINGS": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = forked(as_module, *arguments, environment=environment, folder=tmp_path)
    assert run.code == 0, run.output
    assert run.output.count("Plan") == 1
    assert run.output.count("GLOBAL_RANK: 0") == 1
    assert "[HYDRA]" not in run.output, "the other rank tells nothing"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["world_size"], plan["factor"]) == (32, 2, 2)
    steps = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert steps == 4
    told = result(tmp_path / "run")
    (last,) = (line for line in run.output.splitlines() if line.startswith("Epoch 1/1"))
    assert f"train loss {told['train/loss']:.4f}, acc {told['train/acc']:.4f}" in last
    assert "sync_dist" not in run.output


def test_a_result_that_is_no_number_is_null(command):
    run = command(*EPOCH, "optimizer.lr=1e20")
    assert run.code == 0
    assert json.loads((run.folder / "result.json").read_text(), parse_constant=pytest.fail)["val/loss"] is None
