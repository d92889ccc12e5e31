import errno
import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from command_lines import TINY
from rich.console import Console

from lightning_ga.app import tasks
from lightning_ga.app.terminal import (
    Interrupted,
    Tee,
    interruptions_told,
    keep_in_log,
    printable_everywhere,
    printed_to,
)
from lightning_ga.models.classifier import Classifier


def test_a_terminal_shows_a_question_mark_for_what_it_lacks():
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", errors="strict")
    printable_everywhere(stream, io.StringIO(), None)
    print("8 × 4", file=stream, flush=True)
    assert written.getvalue() == b"8 ? 4\n"


def test_what_is_printed_is_kept_without_a_bars_movements(tmp_path, capsys):
    """Once on the screen and once in the file; lines that are drawn over themselves are not kept."""
    path = tmp_path / "train.log"
    with printed_to(path):
        print("plan")
        sys.stdout.write("\rEpoch 0: 10 %")
        print("\x1b[31mred\x1b[0m", file=sys.stderr)
        keep_in_log("kept alone")
        Console(width=20).print("rich")
    keep_in_log("after the run")
    assert path.read_text() == "plan\nred\nkept alone\nrich\n"
    assert capsys.readouterr().out == "plan\n\rEpoch 0: 10 %rich\n"


def test_a_run_goes_on_when_nobody_reads_what_it_prints(capfd):
    """As of ``| head -1``: told once, beside the output, and kept in the log."""
    reader, writer = os.pipe()
    os.close(reader)
    log = io.StringIO()
    with os.fdopen(writer, "w") as stream:
        tee = Tee(stream, log)
        for _ in range(2):
            print("a line", file=tee, flush=True)
    assert log.getvalue() == "a line\na line\n"
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("Warning: What is printed cannot be shown (Broken pipe): the run goes on")


LINE = f"{sys.executable} -m lightning_ga.train"
RUN = f"{LINE} {' '.join(TINY)} hydra.run.dir=run"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{RUN} >&-", ""),
        (f"({RUN}; test -f run/result.json || echo lost >&2) | head -1", "Warning: What is printed cannot be shown"),
        (f"{LINE} --help >/dev/full", "Error: A file of this run, or what it prints, cannot be written: No space"),
        (f"{LINE} --help | true", ""),
        (f"mkdir x; cd x; rmdir ../x; {LINE} --cfg job", "Error: The current folder has been removed: change to"),
    ],
    ids=["closed", "head", "full", "no reader", "no folder"],
)
def test_a_shell_may_do_anything_to_the_output(tmp_path, line, said):
    """A run leaves its result, and each ends with one sentence at most."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.stderr.startswith(said)
    assert len(run.stderr.splitlines()) == bool(said)
    assert (run.returncode != 0) == said.startswith("Error")
    assert ("hydra.run.dir" in line) == (tmp_path / "run" / "result.json").is_file()


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
        (signal.SIGTERM, 1, 143, "SIGTERM: 4 optimizer steps were done; the state after the last epoch is in"),
        (signal.SIGINT, 1, 130, "Ctrl-C: 4 optimizer steps were done; the state after the last epoch is in"),
        (signal.SIGTERM, 0, 143, "SIGTERM: "),
    ],
)
def test_a_signal_ends_with_its_exit_code_and_what_was_saved(command, monkeypatch, number, epoch, code, told):
    """One sentence: how far it came, where the last checkpoint is, and the command that goes on with it."""
    send_at(monkeypatch, number, epoch=epoch)
    run = command(*THREE_EPOCHS)
    assert run.code == code
    last = run.folder / "checkpoints" / "last.ckpt"
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line.startswith(f"Error: Stopped by {told}")
    again = "Go on with" if epoch else "no checkpoint had been saved yet. Start again"
    assert f"{again}: python -m lightning_ga.train {shlex.join(THREE_EPOCHS)}" in line
    assert line.endswith(f"ckpt_path={last}") == last.is_file() == (epoch > 0)


def test_other_exits_are_left_alone():
    """A library that ends the process has its own reason."""
    with pytest.raises(SystemExit), interruptions_told(lambda: ""):
        raise SystemExit(3)
    with pytest.raises(Interrupted) as told, interruptions_told(lambda: "all is saved."):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(1)  # noqa: B904 (as Lightning does)
    assert (told.value.code, str(told.value)) == (130, "Stopped by Ctrl-C: all is saved.")


@pytest.mark.parametrize("number", [1, 3])
def test_ctrl_c_while_a_checkpoint_is_written(command, monkeypatch, number):
    """torch.save ends with an error of its own then; the checkpoint before it is whole, and named."""
    fail_in_save(monkeypatch, number, KeyboardInterrupt())
    run = command(*THREE_EPOCHS)
    assert run.code == 130
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line.startswith("Error: Stopped by Ctrl-C: ")
    assert ("ckpt_path=" in line) == (number > 1)


def test_ctrl_c_while_the_page_is_written(command, monkeypatch):
    """The run is done, and the sentence does not say that nothing was trained."""
    monkeypatch.setattr(tasks, "write_page", lambda folders: signal.raise_signal(signal.SIGINT))
    run = command(*TINY)
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line == (
        "Error: Stopped by Ctrl-C: the run was done, but for its page: "
        f"python -m lightning_ga.report {run.folder} writes it."
    )
    assert (run.code, (run.folder / "result.json").is_file()) == (130, True)


def test_a_disk_that_is_full_in_mid_training_says_what_was_saved(command, monkeypatch):
    """After the sentence on the disk; the checkpoint before is whole."""
    fail_in_save(monkeypatch, 2, OSError(errno.ENOSPC, "No space left on device"))
    run = command(*THREE_EPOCHS, "callbacks=last")
    line, last = run.mistake, run.folder / "checkpoints" / "last.ckpt"
    assert "cannot be written: No space left on device. Choose another folder" in line
    assert line.endswith(f"ckpt_path={last}")
    assert "8 optimizer steps were done; the state after the last epoch is in" in line
    assert torch.load(last, weights_only=True)["epoch"] == 0


def fail_in_save(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the so-manieth write of a checkpoint fail as torch does if the file cannot be written on."""
    save, writes = torch.save, iter(range(1, 100))

    def fail(checkpoint, file):
        if next(writes) < number:
            return save(checkpoint, file)
        try:
            raise error
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", fail)
