"""The copy of the allocator's books, beside the allocator."""

from pathlib import Path

import device_counters
import pytest

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
if device_counters.is_loaded():
    import books
    from forks import forked


@pytest.mark.parametrize(("check", "programs"), [("same_books", 2), ("same_replay", 20)])
def test_the_books_are_those_of_the_allocator(check: str, programs: int, tmp_path: Path) -> None:
    """In a process of its own: blocks of earlier tests would have holes."""
    ended = forked(getattr(books, check), programs, folder=tmp_path)
    assert ended.code == 0, ended.output


def test_settings_that_change_the_rules_are_noticed(tmp_path: Path) -> None:
    ended = forked(books.told_of_settings, folder=tmp_path)
    assert ended.code == 0, ended.output
