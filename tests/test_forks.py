"""Processes of the tests' own: how they end, what they begin with, and what becomes of one that hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from forks import forked, in_ranks, in_turn


def end_with(code: int | None) -> int | None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return code


def fail() -> None:
    raise ValueError("a mistake")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_rank(codes: list[int]) -> int:
    return codes[int(os.environ["RANK"])]


def one_rank_is_killed() -> None:
    if os.environ["RANK"] == "0":
        be_killed()


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


def leave_somebody_behind(work: bool) -> None:
    """A process that works on for three seconds, or waits for ever, when this one has ended."""
    program = "import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass\nprint('done')"
    subprocess.Popen([sys.executable, "-c", program if work else "import time; time.sleep(600)"])


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_the_exit_code_is_what_is_returned(returned: int | None, code: int, tmp_path: Path) -> None:
    """What is printed is kept."""
    done = forked(end_with, returned, folder=tmp_path)
    assert done.code == code
    assert sorted(done.output.splitlines()) == ["to stderr", "to stdout"]


def test_exceptions_and_signals_are_seen(tmp_path: Path) -> None:
    failed, killed = forked(fail, folder=tmp_path), forked(be_killed, folder=tmp_path)
    assert (failed.code, killed.code) == (1, -signal.SIGKILL)
    assert "ValueError: a mistake" in failed.output


@pytest.mark.parametrize("codes", [[0, 0], [0, 3], [3, 0]])
def test_ranks_end_as_the_worst_of_them(codes: list[int], tmp_path: Path) -> None:
    assert forked(in_ranks, 2, on_rank, codes, folder=tmp_path).code == max(codes)


@pytest.mark.parametrize(("ends", "code"), [((0, 3), 0), ((0, 0), 1)])
def test_calls_in_turn_end_as_they_are_expected_to(ends: tuple[int, int], code: int, tmp_path: Path) -> None:
    """Or the first that does not ends all of them."""
    done = forked(in_turn, end_with, [((0,), ends[0]), ((3,), ends[1]), ((0,), 0)], folder=tmp_path)
    assert done.code == code
    assert done.output.count("to stdout") == (3 if code == 0 else 2)
    assert ("end_with(3,) ended with 3 instead of 0" in done.output) == bool(code)


def test_a_rank_that_is_killed_is_seen(tmp_path: Path) -> None:
    assert forked(in_ranks, 2, one_rank_is_killed, folder=tmp_path).code not in (0, None)


def test_what_hangs_is_ended_and_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its processes do."""
    monkeypatch.setattr(forks, "PATIENCE", 1)
    with pytest.raises(AssertionError, match="3 processes hang") as caught:
        forked(in_ranks, 2, wait_for_ever, folder=tmp_path)
    assert str(caught.value).count("in wait_for_ever") == 2


def test_what_is_left_behind_is_waited_for_as_long_as_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forked(leave_somebody_behind, True, folder=tmp_path).output == "done\n"
    monkeypatch.setattr(forks, "PATIENCE", 1)
    with pytest.raises(AssertionError, match="1 processes hang"):
        forked(leave_somebody_behind, False, folder=tmp_path)
