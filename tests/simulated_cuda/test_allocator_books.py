"""The copy of the allocator's books, beside the allocator."""

from itertools import product
from pathlib import Path

import device_counters
import pytest

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
if device_counters.is_loaded():
    import books
    from forks import forked


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[4:2,16:8,64:1,>:2]",
        "expandable_segments:True",
    ],
)
@pytest.mark.parametrize(("check", "programs"), [("same_books", 2), ("same_replay", 40)])
def test_the_books_are_those_of_the_allocator(check: str, programs: int, setting: str, tmp_path: Path) -> None:
    ended = forked(getattr(books, check), programs, setting, folder=tmp_path)
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("setting", ["", "max_split_size_mb:32", "roundup_power2_divisions:4"])
def test_a_step_is_replayed_from_other_segments_than_it_was_recorded_in(setting: str, tmp_path: Path) -> None:
    ended = forked(books.same_replay_elsewhere, 20, setting, folder=tmp_path)
    assert ended.code == 0, ended.output


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        *product(["", "max_split_size_mb:32", "expandable_segments:True"], [False, True]),
        ("garbage_collection_threshold:0.5", False),  # nothing is collected otherwise
    ],
)
def test_the_books_give_back_what_the_allocator_gives_back(setting: str, others: bool, tmp_path: Path) -> None:
    ended = forked(books.same_under_pressure, 6, setting, others, folder=tmp_path)
    assert ended.code == 0, ended.output


def test_settings_that_change_the_rules_are_noticed(tmp_path: Path) -> None:
    ended = forked(books.told_of_settings, folder=tmp_path)
    assert ended.code == 0, ended.output
