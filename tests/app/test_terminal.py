import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from command_lines import TINY
from lightning.pytorch.utilities import rank_zero_only

from lightning_ga.app.terminal import Console, is_first_rank, report_error
from lightning_ga.errors import RankError, UserError
from lightning_ga.models.classifier import Classifier


def test_a_run_goes_on_when_nobody_reads_what_it_prints(monkeypatch):
    """As of ``| head -1``; signs that a terminal lacks are question marks."""
    for open_reader in (True, False):
        reader, writer = os.pipe()
        if not open_reader:
            os.close(reader)
        with os.fdopen(writer, "w", encoding="ascii") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            for _ in range(2):
                Console().emit(logging.LogRecord("x", logging.INFO, "file", 1, "8 × 4", (), None))
        if open_reader:
            assert os.read(reader, 100) == b"8 ? 4\n8 ? 4\n"


def test_a_shell_may_close_the_output(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    reader, writer = os.pipe()
    os.close(reader)
    line, where = [sys.executable, "-m", "lightning_ga.train", "--help"], {"cwd": tmp_path, "env": environment}
    run = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, **where)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


THREE_EPOCHS = (*TINY, "trainer.max_epochs=3")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Lightning leaves Ctrl-C ignored, and so does a shell that has started the tests in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_at(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *, epoch: int) -> None:
    """Send this process a signal in its first training step of an epoch."""
    whole = Classifier.training_step

    def step(module, batch, batch_idx):
        if module.current_epoch == epoch:
            signal.raise_signal(number)
        return whole(module, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", step)


@pytest.mark.parametrize(
    ("number", "epoch", "code", "told"),
    [
        (signal.SIGTERM, 1, 143, "SIGTERM: 4 optimizer steps were done."),
        (signal.SIGINT, 0, 130, "Ctrl-C: "),
    ],
)
def test_a_signal_ends_with_its_exit_code_and_what_was_saved(command, monkeypatch, number, epoch, code, told):
    """One sentence: how far it came, and the command that resumes it, or begins anew if nothing was saved."""
    with monkeypatch.context() as first:
        send_at(first, number, epoch=epoch)
        run = command(*THREE_EPOCHS)
    assert run.code == code
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line.startswith(f"Error: Stopped by {told}")
    words = shlex.split(line.partition("Resume with: python -m lightning_ga.train ")[2])
    assert words == [*THREE_EPOCHS, f"hydra.run.dir={run.folder}", "ckpt_path=auto"]
    resumed = command(*words)
    assert resumed.code == 0, resumed.err
    assert ("Checkpoint: " in resumed.out) == (epoch > 0)
    assert "Epoch 3/3" in resumed.out


def test_a_run_that_has_no_checkpoint_of_its_own_is_repeated(command, monkeypatch):
    """From the one that it began with, and not from a copy of the best one before, or with fresh weights."""
    worst = (*THREE_EPOCHS, "optimized_direction=max")  # the loss falls: the first epoch's
    first = command(*worst, folder="first")
    send_at(monkeypatch, signal.SIGTERM, epoch=3)
    line = (*worst, "trainer.max_epochs=5", "ckpt_path=outputs/first/checkpoints/last.ckpt")
    for names in (["best.ckpt"], []):
        run = command(*line, folder=f"with_{len(names)}")
        assert [path.name for path in run.folder.rglob("*.ckpt")] == names
        assert f"Resume with: python -m lightning_ga.train {shlex.join(line)}\n" in run.err
        (first.folder / "checkpoints" / "best.ckpt").unlink(missing_ok=True)


def test_a_finished_run_that_is_extended_and_stopped_goes_on(command, shared, monkeypatch):
    """Its result and page were of fewer epochs."""
    first = shared(*THREE_EPOCHS)
    send_at(monkeypatch, signal.SIGTERM, epoch=4)
    line = (*THREE_EPOCHS, "trainer.max_epochs=5")
    run = command(*line, "ckpt_path=last", "hydra.run.dir=outputs/run")
    assert "SIGTERM: 16 optimizer steps were done. Resume with: " in run.err
    assert run.err.endswith(f"{shlex.join(line)} hydra.run.dir={run.folder} ckpt_path=auto\n")
    assert not (first.folder / "result.json").exists()
    assert not (first.folder / "report.html").exists()


def test_ctrl_c_in_a_sweep_names_its_folder(command, monkeypatch):
    """And the checkpoint that was typed."""
    send_at(monkeypatch, signal.SIGINT, epoch=1)
    line = ("-m", *THREE_EPOCHS, "seed=0,1", "ckpt_path=auto")
    run = command(*line, "hydra.sweep.dir=sweep")
    assert run.code == 130
    assert f"lightning_ga.train {shlex.join(line)} hydra.sweep.dir=sweep\n" in run.err


@pytest.mark.parametrize("number", [1, 3])
def test_ctrl_c_while_a_checkpoint_is_written(command, monkeypatch, number):
    """torch.save ends with an error of its own then; the checkpoint before it is whole, and named."""
    save, writes = torch.save, iter(range(1, 100))

    def stopped_in_its_so_manieth_write(checkpoint, file):
        if next(writes) < number:
            return save(checkpoint, file)
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", stopped_in_its_so_manieth_write)
    run = command(*THREE_EPOCHS)
    assert run.code == 130
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line.startswith("Error: Stopped by Ctrl-C: ")
    assert line.endswith("ckpt_path=auto")
    assert [path.name for path in run.folder.rglob("*.ckpt")] == ["best.ckpt", "last.ckpt"][: number - 1]


def test_a_rank_tells_its_own_trouble(capsys, monkeypatch):
    """The first rank tells mistakes; memory that ran out on another is told there."""
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    for error in (UserError("a mistake"), RankError("Memory ran out")):
        report_error(str(error), error)
    told = capsys.readouterr().err
    assert "a mistake" not in told
    assert told.startswith("Error on rank 3: Memory ran out")


def test_the_first_process_of_all_nodes_is_known():
    """As torchrun, srun and Lightning's own launchers name it."""
    for first in ({}, {"RANK": "0", "LOCAL_RANK": "1"}, {"SLURM_PROCID": "0"}, {"NODE_RANK": "0", "LOCAL_RANK": "0"}):
        assert is_first_rank(first)
    for other in ({"RANK": "2", "LOCAL_RANK": "0"}, {"SLURM_PROCID": "1"}, {"NODE_RANK": "1"}, {"LOCAL_RANK": "1"}):
        assert not is_first_rank(other)
