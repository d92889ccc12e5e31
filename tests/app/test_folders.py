"""A run's folder is its own: two runs do not mix, and none overwrites another unasked."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command_lines import TINY
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.folders import clear, own, read_jobs, require_free


def configuration(folder: str, **keys: Any) -> Any:
    hydra = {"run": {"dir": folder}, "sweep": {"dir": folder}, "overrides": {"hydra": []}}
    return OmegaConf.create({"hydra": hydra, "task": "fit", **keys})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", [RunMode.RUN, RunMode.MULTIRUN])
def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, mode):
    """The second one is made under another name, of which the jobs of a sweep are told, too."""
    setup_globals()
    folders = []
    with ExitStack() as locks:
        for _ in range(3):
            config = configuration(f"{tmp_path}/it's/${{now:%Y}}")
            own(config, mode, locks)
            (Path(config.hydra.run.dir if mode == RunMode.RUN else config.hydra.sweep.dir) / "config.yaml").touch()
            section = config.hydra.run if mode == RunMode.RUN else config.hydra.sweep
            folders.append(Path(section.dir))
        told = [f"hydra.sweep.dir='{folders[2]}'".replace("it's", "it\\'s")] if mode == RunMode.MULTIRUN else []
        assert list(config.hydra.overrides.hydra) == told
    assert len(set(folders)) == 3
    assert folders[1].name == f"{folders[0].name}-2"
    assert all(folder.is_dir() for folder in folders)


def test_a_folder_in_use_is_refused(tmp_path):
    """Whatever it holds; when the first run has ended it is free."""
    with ExitStack() as locks:
        own(configuration(str(tmp_path / "x")), RunMode.RUN, locks)
        for mode in (RunMode.RUN, RunMode.MULTIRUN):
            with pytest.raises(UserError, match="Another run is writing into"), ExitStack() as others:
                own(configuration(str(tmp_path / "x")), mode, others)
    with ExitStack() as locks:
        own(configuration(str(tmp_path / "x")), RunMode.RUN, locks)


def test_a_folder_that_holds_a_run_is_for_that_run(tmp_path, monkeypatch):
    """It may go on, by its checkpoint or as the same job of a scheduler; all others need ``overwrite=true``."""
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "best.ckpt").touch()
    other.mkdir()
    require_free(other, configuration(""))
    for keys in (
        {},
        {"ckpt_path": str(other / "last.ckpt")},
        {"ckpt_path": str(tmp_path / "run2")},
        {"ckpt_path": str(run), "task": "test"},
    ):
        goes_on = r"go on with ckpt_path=\S+, or" if keys.get("task", "fit") == "fit" else "or"  # a test does not
        with pytest.raises(
            UserError, match=rf"\(best.ckpt\): give this one another folder, {goes_on} .*overwrite=true"
        ):
            require_free(run, configuration("", **keys))
    for keys in ({"ckpt_path": str(run)}, {"ckpt_path": str(run / "checkpoints/x.ckpt")}, {"ckpt_path": "last"}):
        require_free(run, configuration("", **keys))
    with pytest.raises(UserError, match="holds what a run leaves"):  # last was that of another run
        require_free(run, configuration("", ckpt_path="last"), other / "last.ckpt")
    require_free(run, configuration("", overwrite=True))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    require_free(run, configuration(""))
    monkeypatch.undo()
    (run / "hpc_ckpt_1.ckpt").touch()
    require_free(run, configuration(""))


def test_overwriting_removes_what_runs_leave_and_nothing_else(tmp_path):
    """A folder may hold files of the user's own."""
    for name in (
        "result.json",
        "checkpoints/best.ckpt",
        "mine.txt",
        "checkpoints/notes.txt",
        "data/x.csv",
        "mine.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    clear(tmp_path)
    assert contents(tmp_path).keys() == {"mine.txt", "mine.json", "checkpoints/notes.txt", "data/x.csv"}


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("hydra.run.dir", ()),
        ("hydra.run.dir", ("task=test", "ckpt_path=outputs/run")),
        ("paths.output_dir", ("dry_run=true",)),
        ("callbacks.best.dirpath", ()),
        ("logger.csv.save_dir", ()),
        ("hydra.sweep.dir", ("-m", "seed=0,1")),
    ],
)
def test_a_second_run_in_a_folder_changes_nothing_there(command, shared, key, arguments):
    """One sentence, before anything is written."""
    first = shared(*TINY)
    before = contents(first.folder)
    elsewhere = [] if key == "hydra.run.dir" else ["hydra.run.dir=elsewhere"]
    place = first.folder / "checkpoints" if key.endswith("dirpath") else first.folder
    second = command(*TINY, *arguments, f"{key}={place}", *elsewhere)
    assert "holds what a run leaves" in second.mistake
    assert contents(first.folder) == before


def test_a_run_goes_on_in_its_folder_or_replaces_it(command, shared):
    """With its checkpoint the one, with ``overwrite=true`` the other, of which nothing is left."""
    first = shared(*TINY)
    (first.folder / "predictions.csv").write_text("old\n")
    onward = command(*TINY, "trainer.max_epochs=2", "test=false", f"ckpt_path={first.folder}")
    assert onward.code == 0, onward.err
    assert "Epoch 2/2" in onward.out
    assert (first.folder / "predictions.csv").exists()
    anew = command(*TINY, "dry_run=true", "overwrite=true")
    assert anew.code == 0, anew.err
    left = contents(first.folder).keys()
    assert "plan.json" in left
    assert not {"predictions.csv", "result.json", "checkpoints/last.ckpt", "csv/metrics.csv"} & left


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_hydra_starts_runs_in_the_folders_that_were_made_for_them(command, kind):
    """The second of a year, where the folder is named by the year, and of a sweep its jobs, too."""
    options = ["-m", "seed=3"] if kind == "sweep" else []
    for _ in range(2):
        run = command(*options, *TINY, "dry_run=true", f"hydra.{kind}.dir=all/${{now:%Y}}")
        assert run.code == 0, run.err
    first, second = sorted(Path("all").iterdir())
    assert second.name == f"{first.name}-2"
    for folder in (first, second):
        assert [path.name for path in folder.glob("**/plan.json")] == ["plan.json"]
        assert [path.name for path in folder.glob("**/.hydra")] == [".hydra"]


def test_jobs_of_a_sweep_have_folders_of_their_own(command):
    run = command("-m", *TINY, "dry_run=true", "seed=1,2", "hydra.sweep.dir=many", "hydra.sweep.subdir=same")
    assert "for two jobs of this sweep" in run.mistake


def test_jobs_without_a_number_come_last(tmp_path: Path) -> None:
    """A failed one, and one that diverged, which has no order among numbers; the best first, up or down."""
    for name, value in {"0": 0.5, "1": float("nan"), "2": 0.75, "3": None, "4": 0.25}.items():
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n")
        if value is not None:
            (tmp_path / name / "result.json").write_text(json.dumps({"val/acc": value, "val/loss": value}))
    assert [job.name for job in read_jobs(tmp_path, "val/acc")] == ["2", "0", "4", "1", "3"]
    assert [job.name for job in read_jobs(tmp_path, "val/loss")] == ["4", "0", "2", "1", "3"]


@pytest.mark.parametrize(
    "setting",
    [
        "callbacks.best.dirpath=link",
        "callbacks.best.filename=../../run/checkpoints/best",
        "callbacks.best.dirpath=outputs",
        "logger.csv.version=../../run/csv",
        "logger.csv.name=OWN/csv",
    ],
)
def test_no_way_leads_into_the_folder_of_another_run(command, shared, setting):
    """Links, names and parts of names that lead out of a run's own folder."""
    first = shared(*TINY)
    before = contents(first.folder)
    Path("link").symlink_to(first.folder / "checkpoints")
    filename = ["callbacks.best.filename=run/checkpoints/best"] if setting.endswith("=outputs") else []
    second = command(*TINY, setting.replace("OWN", str(first.folder)), *filename, folder="second")
    assert f", where {setting.partition('=')[0].rpartition('.')[0]} writes, holds what a run leaves (" in second.mistake
    assert contents(first.folder) == before


@pytest.mark.parametrize("name", ["predictions.csv", "train.log"])
def test_a_file_of_the_users_own_is_not_replaced(command, name):
    """If a run would write one of its name; there is nothing to go on with."""
    Path("mine").mkdir()
    Path("mine", name).write_text("mine")
    run = command(*TINY, "hydra.run.dir=mine")
    assert f"'mine' holds what a run leaves ({name}): give this one another folder, or replace" in run.err
    assert contents(Path("mine")) == {name: b"mine"}
