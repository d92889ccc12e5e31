import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import forked
from rich.console import Console

from lightning_ga.app.terminal import (
    Interrupted,
    Tee,
    interruptions_told,
    keep_in_log,
    printable_everywhere,
    printed_to,
    sigterm_ends,
)
from lightning_ga.models.classifier import Classifier


def test_an_ascii_terminal_is_written_to_in_ascii():
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", errors="strict")
    printable_everywhere(stream, io.StringIO(), None)
    print("8 × 4 – 2 µs … ‖─é", file=stream, flush=True)
    assert written.getvalue() == b"8 x 4 - 2 us ... |-?\n"


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


def test_a_log_that_cannot_be_written_ends_no_run():
    """A full disk is told by what must be written."""
    log = io.StringIO()
    log.close()
    shown = io.StringIO()
    print("shown", file=Tee(shown, log), flush=True)
    assert shown.getvalue() == "shown\n"


TINY = ("model=mlp", "debug=default", "trainer.max_epochs=3", "accumulate.micro_batch_size=16")


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


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_signal_ends_with_its_exit_code_and_what_was_saved(command, monkeypatch, number, code, name):
    """One sentence: how far it came, where the last checkpoint is, and the command that goes on with it."""
    send_at(monkeypatch, number, epoch=1)
    run = command(*TINY)
    assert run.code == code
    last = run.folder / "checkpoints" / "last.ckpt"
    assert last.is_file()
    (line,) = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert line.startswith(
        f"Error: Stopped by {name}: 4 optimizer steps were done; the state after the last epoch is in"
    )
    assert f"Go on with: python -m lightning_ga.train {' '.join(TINY)}" in line
    assert line.endswith(f"ckpt_path={last}")


def test_a_signal_in_the_first_epoch_says_that_nothing_was_saved(command, monkeypatch):
    """And how to start again."""
    send_at(monkeypatch, signal.SIGTERM, epoch=0)
    run = command(*TINY)
    assert run.code == 143
    assert "no checkpoint had been saved yet. Start again: python -m lightning_ga.train model=mlp" in run.err


def end_early() -> None:
    """Receive SIGTERM where imports catch everything."""
    with sigterm_ends():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            os._exit(1)


def test_sigterm_before_anything_began_ends_at_once(tmp_path: Path):
    """Even where everything that is raised is caught."""
    ended = forked(end_early, folder=tmp_path)
    assert ended.code == 143
    assert ended.output == "Error: Stopped by SIGTERM: nothing had been trained or saved.\n"


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
