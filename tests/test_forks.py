"""Processes of the tests' own: how they end, what they begin with, and what becomes of one that hangs."""

import os
import signal
import sys
import time
from pathlib import Path

import forks
import pytest
from forks import forked, in_ranks


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


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_the_exit_code_is_what_is_returned(returned: int | None, code: int, tmp_path: Path) -> None:
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


def test_what_hangs_is_ended_and_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 1)
    with pytest.raises(AssertionError, match="3 processes hang") as caught:
        forked(in_ranks, 2, wait_for_ever, folder=tmp_path)
    assert str(caught.value).count("in wait_for_ever") == 2
