"""A run's folder is its own: two runs do not mix, and none overwrites another unasked."""

import csv
from pathlib import Path

import pytest
from command_lines import TINY
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.folders import continues, require_free, set_aside
from lightning_ga.train import rank_overrides


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_continued_from_its_own_folder_alone(monkeypatch):
    """A folder that is named by the clock is another at each start, and another on each rank."""

    def typed(*words, mode=None):
        monkeypatch.setattr(
            HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"hydra": [*words]}, "mode": mode})
        )

    typed("hydra.run.dir=outputs/x")
    assert not continues({})
    assert continues({"ckpt_path": "auto"})
    assert continues({"elastic": True})
    assert not continues({"elastic": True, "task": "test"})
    for variable in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(variable, "0")
        assert not continues({"ckpt_path": "some.ckpt"})
        monkeypatch.setenv(variable, "2")
        assert continues({"ckpt_path": "some.ckpt"})
        typed()
        assert not continues({})
        typed("hydra.run.dir=outputs/x")
        monkeypatch.delenv(variable)
    typed(rank_overrides([], {"RANK": "1"})[-1])
    assert continues({"elastic": True, "run": {"folder": "elastic-7"}})
    for words, mode in (([], None), (rank_overrides([], {"RANK": "1"}), None)):
        typed(*words, mode=mode)
        with pytest.raises(UserError, match=r"each start has another: give hydra.run.dir=…"):
            continues({"ckpt_path": "auto"})
    typed(mode=RunMode.MULTIRUN)
    assert continues({"ckpt_path": "auto"})


def test_a_run_without_checkpoints_begins_anew_in_a_new_folder(tmp_path, capsys):
    """What it has left is kept under another name."""
    folder = tmp_path / "run"
    set_aside(folder)
    folder.mkdir()
    (folder / ".hydra").mkdir()
    set_aside(folder)
    for number in (1, 2):
        (folder / "csv").mkdir(parents=True, exist_ok=True)
        (folder / "csv" / "metrics.csv").write_text(f"step\n{number}\n")
        set_aside(folder)
        assert not folder.exists()
        assert (tmp_path / f"run-before-{number}" / "csv" / "metrics.csv").read_text() == f"step\n{number}\n"
        assert (
            f"contained a run without checkpoints, which is in {tmp_path}/run-before-{number}"
            in capsys.readouterr().out
        )


def test_auto_both_starts_and_continues(command):
    """The same command line, twice and with one more epoch; rows of the logs come once each."""
    line = (*TINY, "test=false", "ckpt_path=auto", "checkpoint_every=3", "trainer.limit_train_batches=1.0")
    first = command(*line)
    assert first.code == 0, first.err
    assert "Checkpoint:" not in first.out
    names = {path.name for path in (first.folder / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "step-36.ckpt", "step-39.ckpt"}
    for name in ("last.ckpt", "best.ckpt"):
        (first.folder / "checkpoints" / name).unlink()
    again = command(*line)
    assert "Checkpoint: " in again.out
    assert "step-39.ckpt (epoch 1, 39 optimizer steps)" in again.out
    assert "Epoch 1/1" in again.out
    files = sorted(again.folder.glob("csv/metrics*.csv"))
    rows = [row for path in files for row in csv.DictReader(path.read_text().splitlines())]
    assert [int(row["step"]) for row in rows if row.get("train/loss_step") or row.get("train/loss")] == [*range(41)], (
        rows
    )
    longer = command(*line, "trainer.max_epochs=2")
    assert "(epoch 1, 41 optimizer steps)" in longer.out
    assert "Epoch 2/2" in longer.out


def test_a_restart_overwrites_nothing(command, shared, monkeypatch):
    """It continues; if no checkpoint is whole, or the training is another, it ends with a sentence."""
    first = shared(*TINY)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    place = "hydra.run.dir=outputs/run"
    before = contents(first.folder)
    other = command(*TINY, place, "data.batch_size=16")
    assert f"data.batch_size was 32 in the run in '{first.folder}' and is 16 now: repeat" in other.mistake
    fresh = {"train.log", ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml"}
    after = contents(first.folder)
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} <= fresh
    assert "epoch 1, 4 optimizer steps" in command(*TINY, place, "test=false").out
    for path in (first.folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-10])
    torn = contents(first.folder)
    assert "No checkpoint in 'outputs/run'" in command(*TINY, place).mistake
    assert contents(first.folder) == torn


def test_elastic_keeps_the_batch_and_says_if_it_is_alone(command):
    """Outside of torchrun it is one rank; the batch must not follow the ranks."""
    run = command(*TINY, "trainer=elastic", "test=false", "data.batch_size=8", "trainer.accumulate_grad_batches=3")
    assert run.code == 0, run.err
    assert "Warning: torchrun has not started this process: training runs on one rank." in run.err
    assert "effective batch  24 = " in run.out
    for words in (["accumulate.accumulate=2"], ["accumulate=off"]):
        line = [word for word in TINY if "off" not in words[0] or not word.startswith("accumulate")]
        assert "With trainer=elastic ranks come and go" in command("trainer=elastic", *line, *words).mistake


def test_auto_is_for_training(command):
    assert "give ckpt_path=best" in command(*TINY, "task=test", "ckpt_path=auto", "hydra.run.dir=x").mistake


def test_a_folder_that_holds_a_run_is_for_that_run(tmp_path, monkeypatch):
    """It may go on, by its checkpoint or as the same job of a scheduler; all others need another folder."""
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "best.ckpt").touch()
    other.mkdir()
    require_free(other, {})
    for keys in (
        {},
        {"ckpt_path": str(other / "last.ckpt")},
        {"ckpt_path": str(tmp_path / "run2")},
        {"ckpt_path": "last"},  # that of another run
        {"ckpt_path": str(run), "task": "test"},
    ):
        with pytest.raises(UserError, match=r"\(best.ckpt\): give the new run another folder, or resume"):
            require_free(run, keys)
    for keys in ({"ckpt_path": str(run)}, {"ckpt_path": str(run / "checkpoints/x.ckpt")}, {"ckpt_path": "best"}):
        require_free(run, keys)
    monkeypatch.setattr(
        HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"hydra": ["hydra.run.dir=run"]}, "mode": None})
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    require_free(run, {})


def test_a_second_run_in_a_folder_changes_nothing_there(command, shared):
    """One sentence, before anything is written."""
    first = shared(*TINY)
    before = contents(first.folder)
    for arguments in (
        [],
        ["task=test", "ckpt_path=outputs/run"],
        ["-m", "seed=0,1", "hydra.sweep.dir=outputs/run"],
        [f"callbacks.best.dirpath={first.folder / 'checkpoints'}", "hydra.run.dir=elsewhere"],
        [f"logger.csv.save_dir={first.folder}", "hydra.run.dir=elsewhere"],
    ):
        assert "contains files of a run" in command(*TINY, *arguments).mistake
    assert contents(first.folder) == before


def test_a_sweep_goes_on_where_it_ended(command):
    """What is done is not run again; another sweep is refused there."""
    line = ("-m", *TINY, "test=false", "hydra.sweep.dir=many")
    run = command(*line, "seed=1,2")
    assert run.code == 0, run.err
    stamp = Path("many/1/result.json").stat().st_mtime_ns
    Path("many/0/result.json").unlink()
    assert "contains the sweep" in command(*line, "seed=3,4").mistake
    again = command(*line, "seed=1,2")
    assert again.code == 0, again.err
    assert Path("many/0/result.json").is_file()
    assert Path("many/1/result.json").stat().st_mtime_ns == stamp


def test_the_last_run_of_a_project_s_own_folders_is_found(command):
    """Its configuration says where runs are."""
    where = "hydra.run.dir=logs/mine/runs/${now:%Y-%m-%d_%H-%M-%S-%f}"
    line = (*TINY, "test=false", "logger=none", where)
    assert command(*line).code == 0
    resumed = command(*line, "ckpt_path=last", "trainer.max_epochs=2")
    assert "Checkpoint: logs/mine/runs/" in resumed.out
    assert "Epoch 2/2" in resumed.out


@pytest.mark.parametrize(
    "changed",
    [
        "model.hidden=[16]",
        "optimizer=timm",
        pytest.param("optimizer=sgd", marks=pytest.mark.slow),
        pytest.param("lr_scheduler=onecycle", marks=pytest.mark.slow),
    ],
)
def test_a_resume_that_cannot_go_on_says_what_to_change(command, shared, changed):
    """Another model, another optimizer, another schedule."""
    first = shared(*TINY, folder="first")
    run = command(*TINY, "test=false", f"ckpt_path={first.folder}", changed, "trainer.max_epochs=2", folder="changed")
    assert f"Checkpoint: {first.folder}" in run.out
    assert "Error: ckpt_path= is of another" in run.err
    assert "as the config.yaml of its run does." in run.err


def test_a_resume_of_a_run_that_has_ended_says_so(command, shared):
    """It has trained all of its epochs; a sentence that also holds in the middle of the last one."""
    first = shared(*TINY, folder="first")
    ended = command(*TINY, "test=false", f"ckpt_path={first.folder}", folder="ended")
    assert ended.code == 0, ended.err
    assert "The checkpoint is of epoch 1, and trainer.max_epochs=1: set a larger number" in ended.err


def test_a_failed_job_of_a_sweep_is_named(command):
    """The others run; the sweep ends with code 1 and the job's number and overrides."""
    run = command("-m", *TINY, "test=false", "data=cifar10,digits", "hydra.sweep.dir=many")
    assert run.code == 1
    assert "Error: job 0 (" in run.err
    assert "data=cifar10" in run.err
    assert "  0  failed" in run.out
    assert Path("many/1/result.json").is_file()
