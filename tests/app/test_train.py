import csv
import json
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_lines import TINY as EPOCH
from forks import forked
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lightning_ga import UserError, train
from lightning_ga.app import tasks
from lightning_ga.models.classifier import Classifier
from lightning_ga.train import options_first

SMALL = ("model=mlp", "model.hidden=[32]")
QUICK = (*SMALL, "trainer.max_epochs=2", "trainer.accelerator=cpu", "accumulate.micro_batch_size=16")
TINY = (*EPOCH, "trainer.max_epochs=2")
BY_STEP = (*QUICK, "trainer.max_epochs=1", "trainer.log_every_n_steps=1", "optimized_metric=train/loss")


def result(folder: Path) -> dict[str, float]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def quick(shared):
    """A run of two epochs with nothing out of the ordinary."""
    return shared(*QUICK, folder="fit")


def test_a_run_leaves_everything_to_read(quick):
    """Config, plan, logs by optimizer step, curves, a report per class, best and last checkpoint."""
    assert quick.code == 0
    assert quick.err == ""
    files = {str(path.relative_to(quick.folder)) for path in quick.folder.rglob("*") if path.is_file()}
    assert {
        "config.yaml",
        "plan.json",
        "result.json",
        "loss_curves.png",
        "classification_report.txt",
        "classification_report.json",
        "csv/metrics.csv",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    } <= files
    assert any(name.startswith("tensorboard/events") for name in files)
    plan = json.loads((quick.folder / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["factor"], plan["micro_batch_size"]) == (32, 2, 16)


def test_the_plan_is_printed_first_and_the_result_last(quick):
    lines = quick.out.strip().splitlines()
    assert lines[0].strip() == "Plan"
    assert "32 = 16 × 2 × 1 (micro-batch × factor × ranks)" in lines[3]
    assert lines[-2].startswith("Result after ")
    assert "test/acc" in lines[-2]


def test_where_there_is_no_terminal_an_epoch_is_one_line(quick):
    epochs = [line for line in quick.out.splitlines() if line.startswith("Epoch")]
    assert [line.split(":")[0] for line in epochs] == ["Epoch 1/2", "Epoch 2/2"]
    assert all("train loss" in line and "val loss" in line and len(line) <= 80 for line in epochs)
    assert "\r" not in quick.out
    assert (quick.folder / "train.log").read_text() == quick.out


@pytest.mark.parametrize(("progress", "shown"), [("bar", "effective=32"), ("rich", "effective"), ("none", "Result")])
def test_progress_is_shown_as_was_asked_for(command, progress, shown):
    """A bar, a bar in colour, or nothing; the log has a line an epoch all the same."""
    run = command(*TINY, f"progress={progress}")
    assert run.code == 0, run.err
    assert shown in run.out
    assert ("Epoch 2/2: train loss" in run.out) == (progress != "none")
    assert "Epoch 0" not in run.out
    log = (run.folder / "train.log").read_text()
    assert log.count("Epoch 1/2: train loss") == 1
    assert "\r" not in log


def test_the_result_of_a_training_is_the_mean_over_its_last_epoch(shared):
    """Not that of the last, smaller window; checkpoints that watch it see the same."""
    run = shared(*BY_STEP)
    with (run.folder / "csv" / "metrics.csv").open() as file:
        windows = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    sizes = [32] * 40 + [1293 - 40 * 32]
    mean = sum(size * loss for size, loss in zip(sizes, windows)) / sum(sizes)
    assert result(run.folder)["train/loss"] == pytest.approx(mean, rel=1e-5)
    assert result(run.folder)["train/loss"] != pytest.approx(windows[-1], rel=1e-3)
    best = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)["callbacks"]
    assert any(state.get("best_model_score") == pytest.approx(mean, rel=1e-5) for state in best.values())


def test_checkpoints_hold_plain_values_only(shared):
    run = shared(*TINY)
    for name in ("best.ckpt", "last.ckpt"):
        path = run.folder / "checkpoints" / name
        assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
        assert torch.load(path, weights_only=True)["hyper_parameters"]["hidden"] == [32]


def test_a_seed_decides_the_run(command, shared):
    first, again, other = shared(*TINY), command(*TINY, folder="again"), command(*TINY, "seed=2", folder="other")
    strip = [{k: v for k, v in result(run.folder).items() if k != "seconds"} for run in (first, again, other)]
    assert strip[0] == strip[1] != strip[2]


def test_a_small_device_says_what_fills_its_memory(command):
    """Under a budget the factor grows above 1; tests/test_readme.py holds that the result is that of whole batches."""
    small = command("model=mlp", "dry_run=true", "accumulate.memory_budget=15MiB", "data.batch_size=256")
    assert small.code == 0, small.err
    records = json.loads((small.folder / "plan.json").read_text())
    assert records["plan"]["factor"] > 1
    assert records["probe"]["peak_bytes"] <= records["probe"]["budget_bytes"] == 15 * 2**20
    where, held, remedy = records["memory"]
    assert "with 119 samples, in the optimizer's step" in where
    assert held.startswith("optimizer state 5.3 MiB, the optimizer's temporaries 4.0 MiB, parameters 2.6 MiB")
    printed = " ".join(small.out.split())
    assert all(line in printed for line in (where, held, remedy))
    assert (small.folder / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert not (small.folder / "checkpoints").exists()
    assert "Epoch" not in small.out


def test_a_run_that_survived_says_so_at_its_end(command, shared, monkeypatch):
    """How often memory ran out, on the screen and in ``result.json``; nothing where it never did."""
    smooth = shared(*TINY, folder="smooth")
    whole = Classifier.training_step

    def at_most_eight(module, batch, batch_idx):
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(module, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", at_most_eight)
    with pytest.warns(UserWarning, match="Memory ran out in training"):
        run = command(*TINY)
    assert result(run.folder)["oom_events"] == 1
    assert "Survived 1 out-of-memory error: what was told of it stands above." in run.out.splitlines()
    assert result(run.folder)["val/loss"] == pytest.approx(result(smooth.folder)["val/loss"], rel=1e-4)
    assert "Survived" not in smooth.out
    assert "oom_events" not in result(smooth.folder)


def test_a_run_has_a_name_and_tags(command):
    """In the folder's name, in the configuration, which trackers are built from, and on the page."""
    run = command(*TINY, "run.name=first", "run.tags=[small,tried]", "hydra.run.dir='${home:x}${named:${run.name}}'")
    assert run.code == 0, run.err
    folder = Path("x-first")
    page = (folder / "report.html").read_text()
    assert "first" in page
    assert "small, tried" in page
    trackers = command(
        "--cfg", "job", "-p", "logger", "logger=[wandb,mlflow]", "run.name=first", "run.tags=[a]", "--resolve"
    )
    assert all(word in trackers.out for word in ("name: first", "run_name: first", "- a", "a: ''"))


def test_a_wrong_name_makes_no_folder(command):
    run = command(*TINY, "run.name=../x", "hydra.run.dir='here${named:${run.name}}'")
    assert run.mistake.startswith("Error: run.name=../x must be a name of letters, digits")
    assert not list(Path.cwd().iterdir())


def test_what_recipes_of_images_set(command):
    """Mixed samples, smoothed labels, no decay of norms; the check says what mixing means for accumulation."""
    run = command(
        *(*TINY, "accumulate.verify=true", "data.mixup=0.2", "data.cutmix=1.0", "data.rand_augment=9"),
        "model.label_smoothing=0.1",
        *("optimizer=adamw", "optimizer.decay_norms=false", "accumulate.effective_batch_size=32"),
    )
    assert run.code == 0, run.err
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["exactness"]["cause"] == "random"
    assert "accumulation is right on average" in plan["told"]["exactness"]
    assert result(run.folder)["test/top5"] >= result(run.folder)["test/acc"]
    groups = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0][
        "param_groups"
    ]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.01]


@pytest.mark.slow
def test_resnet34d_learns_the_digits(command):
    """The main job reaches 95 % on the test set; by default it trains 4 epochs, and 2 are enough."""
    run = command("model=resnet34d", "trainer.max_epochs=2")
    assert run.code == 0, run.err
    assert result(run.folder)["test/acc"] >= 0.95


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model=nope"], ["model=nope", "mlp, resnet34d, simclr, timm"]),
        (["modle=mlp"], ["did you mean model?"]),
        (["model=timm", "model.name=resnet34dd"], ["'resnet34dd'", "nearest names: resnet34d"]),
        (["model=mlp", "data=cifar10"], ["add data.download=true to the same line"]),
        (["model=mlp", "precision=fp16-mixed", "trainer.accelerator=cpu"], ["needs a GPU", "bf16-mixed"]),
        (["model=mlp", "accumulate.memory_budget=1MiB"], ["memory_budget"]),
        (["model=mlp", "accumulate.effective_batch_size=0"], ["effective_batch_size=0 must be at least 1"]),
        (["model=mlp", "optimizer._target_="], ["optimizer has no _target_, and builds nothing"]),
        (["model=mlp", "hydra.mode=SWEEP"], ["hydra.mode=SWEEP: Invalid value 'SWEEP'", "MULTIRUN"]),
        (["model=mlp", "optimizer=[]"], ["optimizer=[] chooses no option"]),
        (["model=mlp", "~optimizer"], ["~optimizer leaves a run without optimizer"]),
        (["model=mlp", "trainer.compile=true"], ["did you mean compile?"]),
        (["model=mlp", "task=test"], ["needs trained weights", "ckpt_path=best"]),
        (["optimizer._target_=torch.load"], ["torch.load is not on the list"]),
        (["--experimental-rerun", "x.pickle"], ["unpickles"]),
        (["model=mlp", "+optimizer.eps=abc"], ["optimizer or lr_scheduler cannot work with what it is given ("]),
        (["model=mlp", "trainer.max_epochs=-1"], ["trainer.max_epochs=-1 has no end", "lr_scheduler=none"]),
        (["model=mlp", "ckpt_path=/etc/passwd"], ["'/etc/passwd' is no file of tensors"]),
        (["model=mlp", "model.num_classes=3"], ["model.num_classes=3 is less than the 10 classes"]),
        (["model=mlp", "data.val_fraction=0.001"], ["cannot be held out with each of the 10", "data.val_fraction"]),
        (["accumulate=off", "+accumulate.verify=true"], ["accumulate has no _target_"]),
        (["callbacks=none", "callbacks.best.monitor=x"], ["is left out (as by callbacks=none): give one of the two"]),
        (["model=mlp", "+callbacks.mine.x=1"], ["callbacks.mine has no _target_", "callbacks=OPTION"]),
        (["data=image_folder", "data.root='~/none-of-mine'"], [f"'{Path.home()}/none-of-mine/train' needs one folder"]),
        (["ckpt_path=~/none.ckpt"], [f"ckpt_path={Path.home()}/none.ckpt is not a file"]),
        (["model", "=", "mlp"], ["model = mlp has a blank beside the =: write model=mlp."]),
        (["model=“mlp”"], ["holds quotes of a word processor", "type ' and \" instead"]),
        (["logger=[csv,nope]"], ["logger=nope does not exist", "The options: csv, default, many, mlflow, none"]),
        (["model=mlp", "model.hidden.first=3"], ["A value does not fit what it sets (invalid literal for int()"]),
        (["dry_run=true", "device_memory=16"], ["device_memory=16 is a number of bytes: write device_memory='16GiB'"]),
        (["model=mlp", "model.optimizer.lr=1"], ["no key model.optimizer.lr; did you mean optimizer.lr?"]),
        (
            ["model=timm", "model.name=vit_tiny_patch16_224", "+model.options.img_size=64", "accumulate=off"],
            ["The model cannot take what it is given (Input height (32) doesn't match model (64).)"],
        ),
        (["model=hashed_patches", "accumulate=off"], ["(Adam does not support sparse gradients, please consider"]),
        (["model=mlp", "ckpt_path="], ['ckpt_path="" must be a path or null']),
        (
            ["model=timm", "model.name=vit_tiny_patch16_224", "data.image_size=7", "accumulate=off"],
            ["Kernel size: (16 x 16)"],
        ),
        (["+lr=0.1"], ["+lr=… sets lr, which nothing reads"]),
        (["run=first"], ["run=first replaces a whole section: set run.name=… alone."]),
        (["model=mlp", "dry_run=true", "device_memory=300MiB"], ["leaves nothing to a training"]),
        (["model=mlp", "dry_run=true", "device_memory=8GiB", "trainer.strategy=fsdp"], ["only data parallelism"]),
        (["model=mlp", "accumulate.foo=3"], ["no key accumulate.foo", "effective_batch_size"]),
        (["ckpt_path=epoch=1.ckpt"], ["is quoted twice", "'ckpt_path=\"epoch=1.ckpt\"'"]),
        (["model=mlp", "model"], ["model is neither an option nor KEY=VALUE"]),
        (["model=mlp", "hydra.run.dir=/proc/no"], ["'/proc/no' cannot be written", "hydra.run.dir=FOLDER"]),
        (["model=mlp", "logger=wandb"], ["pip install wandb"]),
        (["model=timm", "+model.options.checkpoint_path=x.pth"], ["use model.init_from=PATH instead"]),
        (["model=mlp,gpt"], ["model=mlp,gpt is several values: -m runs one after the other; a list is [mlp,gpt]."]),
        (["--resolve"], ["--resolve says how a configuration is shown", "add --cfg job"]),
        (["model=mlp", "-p", "model"], ["-p says how a configuration is shown", "add --cfg job"]),
        (["--run", "-m"], ["Only one of --run, --multirun, --cfg"]),
        (["--config-dir", ".", "--config-name", "empty"], ["has no task: let its defaults begin with train"]),
        (
            ["model=mlp", "accumulate=false"],
            ["accumulate=false chooses no option", "write accumulate=off to do without"],
        ),
        (["model=../../x"], ["model=../../x does not exist"]),
        (["hydra/launcher=nope"], ["hydra/launcher=nope does not exist"]),
        (["--config-dir=~/none"], [f"'{Path.home()}/none' not found"]),
        (
            ["trainer.devices=0", "dry_run=true", "device_memory=16GiB"],
            ["trainer.devices=0 must be a number of devices"],
        ),
        (["--config-dir", ".", "--config-name", "empty", "model=mlp"], ["has no model: let its defaults begin with"]),
        (["--config-name", "nope"], ["--config-name nope does not exist. The names: train."]),
        (
            ["model=mlp", "lr_scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
            ["unexpected keyword argument 'warmup'"],
        ),
        (
            ["model=mlp", "data.augment=[{_target_:torchvision.transforms.v2.RandomCrop,size:99}]"],
            ["Required crop size (99, 99) is larger", "change data.augment or data.image_size"],
        ),
    ],
    ids=lambda value: value[-1] if value and "=" in value[-1] else None,
)
def test_a_mistake_ends_in_one_sentence(command, arguments, parts):
    """Exit code 1 and one line on stderr that names the mistake and the way out; nothing is trained."""
    Path("empty.yaml").write_text("seed: 1\n")
    run = command(*arguments)
    for part in parts:
        assert part in run.mistake
    assert "Epoch" not in run.out


@pytest.mark.parametrize("measured", [None, 0.5])
def test_a_search_without_a_number_is_refused(monkeypatch, measured):
    """At once where nothing is trained, and after a job that measured nothing."""
    sweeper = SimpleNamespace(_target_="hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper")
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.MULTIRUN, sweeper=sweeper))
    monkeypatch.setattr(train, "check_values", lambda config: None)
    monkeypatch.setattr(train, "is_first_rank", lambda variables: False)
    monkeypatch.setattr(tasks, "run_task", lambda config, written, allow: measured)
    jobs = train.Jobs([], show_traceback=False)
    content = {"optimized_metric": "val/acc", "dry_run": False}
    for config in (content | {"dry_run": True}, *([content] if measured is None else [])):
        with pytest.raises(
            UserError, match="A search compares jobs by optimized_metric=val/acc, and this one measures n"
        ):
            jobs._run(config, config, "run")
    assert measured is None or jobs._run(content, content, "run") == measured


@pytest.mark.skipif(find_spec("optuna") is not None, reason="the extra 'sweep' is installed")
def test_a_search_without_its_package_says_what_to_install(command):
    assert command("search=optuna").mistake == (
        "Error: hydra/sweeper=optuna needs a package that is not installed: pip install 'lightning_ga[sweep]'"
    )


def test_traceback_shows_an_error_in_full(command):
    with pytest.raises(UserError, match="data=mnist"):
        command("model=mlp", "data=mnist", "--traceback")


def test_hydras_own_help_is_shown_whatever_else_is_typed(command):
    shown = command("--hydra-help", "model=mlp")
    assert (shown.code, "Hydra" in shown.out) == (0, True), shown.err


def test_help_shows_examples_groups_and_keys(command):
    """All that a newcomer needs."""
    run = command("--help")
    assert run.code == 0
    assert not Path("outputs").exists()
    for part in (
        "accumulate.memory_budget=",
        "model: gpt, hashed_patches, mlp, resnet34d, simclr, timm",
        "ckpt_path=last|best|FOLDER|PATH",
        "--config-dir",
    ):
        assert part in run.out


def test_a_user_brings_configurations(command):
    """--config-dir adds a folder, wherever it stands on the line; its experiment is read last."""
    path = Path("mine/experiment/small.yaml")
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\ndefaults:\n  - override /model: mlp\ndata:\n  batch_size: 7\n")
    run = command("experiment=small", "--config-dir", "mine", "--cfg", "job", "-p", "data")
    assert "batch_size: 7" in run.out


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_dry_run_plans_for_a_device_that_is_not_here(command, precision):
    """A GPU's plan on a machine without one, in 80 columns and as JSON; nothing is run here."""
    elsewhere = ("trainer=gpu", "trainer.devices=4", "trainer.strategy=ddp", f"precision={precision}")
    run = command("model=mlp", "data.batch_size=300", "dry_run=true", "device_memory=620MB", *elsewhere)
    assert run.code == 0, run.err
    assert "for 4 devices of 591.3 MiB; nothing was run" in run.out
    assert max(map(len, run.out.splitlines())) <= 80
    records = json.loads((run.folder / "plan.json").read_text())
    assert records["probe"]["source"] == "estimate"
    assert (records["plan"]["world_size"], records["plan"]["effective_batch_size"]) == (4, 1200)
    assert records["probe"]["budget_bytes"] == 620_000_000 - records["device"]["reserved_bytes"]
    assert not (run.folder / "checkpoints").exists()


def test_last_goes_on_where_a_run_ended(command, shared):
    shared(*TINY, folder="first")
    run = command(*TINY, "trainer.max_epochs=3", "ckpt_path=last", folder="second")
    assert run.code == 0, run.err
    assert "Epoch 3/3" in run.out
    assert "Epoch 2/3" not in run.out
    assert torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 12


def test_a_finished_run_says_that_it_is_complete(command, shared):
    shared(*TINY, folder="first")
    run = command(*TINY, "ckpt_path=last", folder="second")
    assert run.code == 0, run.err
    assert "Training was already complete (8 optimizer steps): go on with trainer.max_epochs=3 or more." in run.out


def test_one_cycle_is_not_prolonged(command):
    command(*TINY, "lr_scheduler=onecycle", folder="first")
    run = command(*TINY, "lr_scheduler=onecycle", "ckpt_path=last", "trainer.max_epochs=3", folder="second")
    assert run.mistake.startswith("Error: OneCycleLR was made for 8 optimizer steps and cannot be prolonged to 12")


def test_best_is_tested_validated_and_predicted_with(command, quick):
    """The other tasks take the best checkpoint of the latest run and repeat its numbers."""
    trained = result(quick.folder)
    tested = result(command(*SMALL, "task=test", "ckpt_path=best", folder="test").folder)
    assert tested["test/acc"] == trained["test/acc"]
    validated = result(command(*SMALL, "task=validate", "ckpt_path=best", folder="validate").folder)
    assert validated["val/acc"] == trained["val/acc"]
    predicted = command(*SMALL, "task=predict", "ckpt_path=best", folder="predict").folder / "predictions.csv"
    assert len(predicted.read_text().splitlines()) == 361


def test_a_sweep_runs_every_combination_and_goes_on_where_it_ended(command):
    """Two values make two runs, each with its own folder; of these, those that are done are not run again.

    Those with another configuration are refused, or replaced if typed.
    """
    run = command("-m", *TINY, "seed=1,2", "hydra.sweep.dir=multirun")
    assert run.code == 0, run.err
    assert [Path(f"multirun/{job}/plan.json").is_file() for job in (0, 1)] == [True, True]
    lines = run.out.splitlines()
    (first,) = [place for place, line in enumerate(lines) if line.startswith("job  val/acc")]
    assert sorted(line.split()[-1] for line in lines[first + 1 : first + 3]) == ["seed=1", "seed=2"]
    with Path("multirun/sweep.csv").open() as file:
        assert sorted(row["job"] for row in csv.DictReader(file)) == ["0", "1"]
    stamp = Path("multirun/1/result.json").stat().st_mtime_ns
    Path("multirun/0/result.json").unlink()
    again = command("-m", *TINY, "seed=1,2", "hydra.sweep.dir=multirun")
    assert again.code == 0
    assert Path("multirun/0/result.json").is_file()
    assert Path("multirun/1/result.json").stat().st_mtime_ns == stamp
    assert lines[-4:-1] == again.out.splitlines()[-4:-1]
    before = {path: path.read_bytes() for path in Path("multirun").rglob("*") if path.is_file()}
    other = "-m", *TINY, "optimizer.lr=0.01", "seed=1", "hydra.sweep.dir=multirun"
    assert "multirun/0' holds what a run leaves (config.yaml, result.json, plan.json)" in command(*other).err
    assert {path: path.read_bytes() for path in before if path.name != "multirun.yaml"}.items() <= before.items()
    assert command(*other, "overwrite=true").code == 0
    assert Path("multirun/0/result.json").read_bytes() != before[Path("multirun/0/result.json")]


def test_a_failed_job_of_a_sweep_is_named(command):
    """The others run; the sweep ends with code 1 and the job's number and overrides."""
    run = command("-m", *TINY, "data=cifar10,digits", "hydra.sweep.dir=multirun")
    assert run.code == 1
    assert "Error: job 0 (" in run.err
    assert "data=cifar10" in run.err
    assert "  0  failed" in run.out
    assert "add hydra.sweep.dir=multirun to the same command line" in run.out
    assert Path("multirun/1/result.json").is_file()


def test_a_sweep_refuses_several_processes_per_job(command):
    run = command("-m", *TINY, "trainer=ddp", "seed=1,2", "hydra.sweep.dir=multirun")
    assert run.code == 1
    assert "cannot start several processes" in run.err


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
    arguments = [*TINY, "trainer=ddp", "data.batch_size=16", "accumulate.micro_batch_size=8", "hydra.run.dir=run"]
    environment = {"PYTHONWARNINGS": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = forked(as_module, *arguments, environment=environment, folder=tmp_path)
    assert run.code == 0, run.output
    assert run.output.count("Plan") == 1
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["world_size"], plan["factor"]) == (32, 2, 2)
    steps = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert steps == 8
    told, result = (json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("epochs", "result"))
    assert [told[-1][name] for name in ("train/loss", "train/acc")] == [result["train/loss"], result["train/acc"]]
    assert "sync_dist" not in run.output


def test_options_may_stand_anywhere():
    """Hydra itself takes overrides in one piece only."""
    assert options_first(["a=1", "-m", "b=2", "-cd", "x", "c=3"]) == ["-m", "-cd", "x", "a=1", "b=2", "c=3"]


def test_samples_that_have_no_other_to_be_mixed_with_are_told(command):
    """A micro-batch of one."""
    run = command(*TINY, "data.mixup=0.2", "accumulate.micro_batch_size=1", "dry_run=true")
    assert run.code == 0, run.err
    assert "Warning: data.mixup and data.cutmix mix the samples of a micro-batch, and these have one" in run.err
