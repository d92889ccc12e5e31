"""Jobs of a sweep that train on several devices run in processes of their own; table and exit codes are the same."""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import TINY
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_ga.app import own_process
from lightning_ga.app.build import starts_processes
from lightning_ga.app.own_process import words_of_job

SLURM = {
    **{"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    **{"SLURM_NODEID": "0", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7"},
}


class Jobs:
    """Stands for ``subprocess.Popen``: each job leaves its loss, or ends with a code."""

    def __init__(self, outcomes: dict[str, Any]) -> None:
        self.outcomes = outcomes
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> "Jobs":
        self.commands.append(command)
        return self

    def wait(self) -> int:
        words = self.commands[-1]
        outcome = next(self.outcomes[word] for word in words if word in self.outcomes)
        if isinstance(outcome, int):
            return outcome
        folder = next(word for word in words if word.startswith("hydra.run.dir=")).partition("=")[2].strip('"')
        result = {"val/loss": outcome, "optimized_metric": "val/loss", "optimized_direction": "min"}
        (Path(folder) / "result.json").write_text(json.dumps(result))
        shutil.copy(Path(folder) / ".hydra" / "config.yaml", Path(folder) / "config.yaml")
        return 0


def test_a_sweep_on_two_devices_ends_with_the_table(command, monkeypatch):
    """Each job has its own overrides and folder; one that fails is named, and the sweep ends with code 1."""
    jobs = Jobs({"seed=1": 0.5, "seed=2": 3, "seed=3": 0.25})
    monkeypatch.setattr(own_process.subprocess, "Popen", jobs)
    line = ("-m", *TINY, "trainer=ddp", "hydra.sweep.dir=many", "seed=1,2,3")
    run = command(*line)
    assert run.code == 1
    assert "Error: job 1 (" in run.err
    assert "its process ended with exit code 3, see above." in run.err
    assert [line.split()[:2] for line in run.out[run.out.index("job  val/loss") :].splitlines()[1:4]] == [
        ["2", "0.2500"],
        ["0", "0.5000"],
        ["1", "failed"],
    ]
    first = jobs.commands[0]
    assert first[:3] == [sys.executable, "-m", "lightning_ga.train"]
    assert {"trainer=ddp", "seed=1", "hydra.job.num=0", "~hydra.callbacks.own_folder"} < {*first}
    assert first.count("-m") == 1
    jobs.outcomes["seed=2"] = 0.125
    jobs.commands.clear()
    again = command(*line)
    assert again.code == 0, again.err
    assert len(jobs.commands) == 1
    assert "seed=2" in jobs.commands[0]


@pytest.mark.parametrize(("signum", "named"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_job_that_is_interrupted_ends_the_sweep(command, monkeypatch, signum, named):
    """With the code of the signal, as a sweep on one device."""
    jobs = Jobs({"seed=1": 128 + signum, "seed=2": 0.5})
    monkeypatch.setattr(own_process.subprocess, "Popen", jobs)
    run = command("-m", *TINY, "trainer=ddp", "hydra.sweep.dir=many", "seed=1,2")
    assert run.code == 128 + signum
    assert f"Stopped by {named}: the jobs that are done are in many." in run.err
    assert len(jobs.commands) == 1


def test_the_command_line_of_a_job_keeps_options_and_quotes(monkeypatch):
    """Interpolations stay as they are written; the sweep's own options go, and so does a sweep that a file defines."""
    overrides = {"task": ["+a=${b}", "x=[1,2]"], "hydra": ["hydra.sweep.dir=many"]}
    own = OmegaConf.create({"overrides": overrides, "job": {"num": 4}, "callbacks": {}})
    monkeypatch.setattr(HydraConfig, "get", lambda: own)
    typed = ["-m", "--config-path=/conf", "--config-name", "mine", "~a", "x=[1,2],[3]", "hydra.sweep.dir=many"]
    assert words_of_job(Path('many/a "b"'), typed) == [
        *("--config-path=/conf", "--config-name", "mine", "+a=${b}", "x=[1,2]"),
        *(r'hydra.run.dir="many/a \"b\""', "hydra.job.num=4", "hydra.mode=RUN"),
    ]


@pytest.mark.parametrize(
    ("trainer", "environment", "expected"),
    [
        ({"devices": 1}, {}, False),
        ({"devices": 2}, {}, True),
        ({"devices": 1, "strategy": "ddp", "num_nodes": 2}, {}, True),
        ({"devices": 2, "strategy": "ddp"}, SLURM, False),
    ],
)
def test_processes_that_a_launcher_has_started_are_not_started_again(monkeypatch, trainer, environment, expected):
    """As those of submitit on SLURM: each of them is a rank of the job."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    target = {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu"}
    assert starts_processes(OmegaConf.create({"trainer": {**target, **trainer}})) is expected


@pytest.mark.slow
def test_a_newcomers_sweep_on_two_ranks(command):
    """Real processes: two jobs on two ranks each."""
    run = command("-m", *TINY, "trainer=ddp", "test=false", "hydra.sweep.dir=many", "seed=1,2")
    assert run.code == 0, run.err
    results = [json.loads(Path(f"many/{number}/result.json").read_text()) for number in (0, 1)]
    values = sorted(f"{result['val/loss']:.4f}" for result in results)
    table = run.out[run.out.index("job  val/loss") :].splitlines()[1:3]
    assert [line.split()[1] for line in table] == values
