import io
import sys

from rich.console import Console

from lightning_ga.app.terminal import Tee, keep_in_log, printable_everywhere, printed_to


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
