"""A run's folder is its own: two runs do not mix, and none overwrites another unasked."""

import csv
import json
from pathlib import Path

import pytest
from command_lines import TINY

from lightning_ga import UserError
from lightning_ga.app.folders import report_sweep, require_free


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def test_a_sweep_ends_with_a_table(tmp_path, capsys):
    """The best first, up or down, then those without a number."""
    results = {"0": 0.5, "1": None, "2": 0.75, "3": "failed", "4": 0.25}
    for direction, order in (("max", "20413"), ("min", "40213")):
        for name, value in results.items():
            (tmp_path / name / ".hydra").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n- same=1\n")
            if value != "failed":
                optimized = {"optimized_metric": "val/x", "optimized_direction": direction}
                (tmp_path / name / "result.json").write_text(json.dumps({"val/x": value, **optimized}))
        report_sweep(tmp_path)
        lines = capsys.readouterr().out.strip().splitlines()
        assert "".join(line.split()[0] for line in lines[1:6]) == order
        assert lines[1].split()[1:] == [f"{results[order[0]]:.4f}", f"seed={order[0]}"]
        assert lines[-1].startswith("To run again what is missing")
    with (tmp_path / "sweep.csv").open() as file:
        lengths = {len(row) for row in csv.reader(file)}
        file.seek(0)
        assert lengths == {4}
        assert [row["outcome"] for row in csv.DictReader(file)] == ["done", "done", "done", "done", "failed"]


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
    assert f"Error: ckpt_path={first.folder} is of another" in run.err
    assert "as the config.yaml of its run does." in run.err


def test_a_resume_of_a_run_that_has_ended_says_so(command, shared):
    """It has trained all of its epochs."""
    first = shared(*TINY, folder="first")
    ended = command(*TINY, "test=false", f"ckpt_path={first.folder}", folder="ended")
    assert ended.code == 0, ended.err
    assert "has trained 1 epoch of trainer.max_epochs=1: set a larger number" in ended.err


def test_a_failed_job_of_a_sweep_is_named(command):
    """The others run; the sweep ends with code 1 and the job's number and overrides."""
    run = command("-m", *TINY, "test=false", "data=cifar10,digits", "hydra.sweep.dir=many")
    assert run.code == 1
    assert "Error: job 0 (" in run.err
    assert "data=cifar10" in run.err
    assert "  0  failed" in run.out
    assert Path("many/1/result.json").is_file()
    assert "cannot start several processes" in command("-m", *TINY, "trainer=ddp", "hydra.sweep.dir=x").err
