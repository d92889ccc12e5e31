"""The benchmark of everything at once: what it draws, what it tells, and how it judges."""

import json
import random
from pathlib import Path

import pytest
from forks import forked

from benchmarks import chaos, output
from benchmarks.disasters import CELLS, MOMENTS, PLACES, draw


def test_a_seed_tells_the_same_stories() -> None:
    """Of every model, mode and number of ranks in turn; together they come to every place."""
    first, again, other = ([draw(random.Random(seed), n) for n in range(40)] for seed in (1, 1, 2))
    assert first == again != other
    rng = random.Random(0)
    stories = [draw(rng, number) for number in range(64)]
    assert [(story.model, story.mode, story.ranks) for story in stories[: len(CELLS)]] == list(CELLS)
    lives = [life for story in stories for life in story.lives]
    assert {fault.place for life in lives for fault in life.faults} == set(PLACES)
    assert {life.end.place for life in lives if life.end} == set(MOMENTS)
    assert all(story.lives[-1].end is None for story in stories)


def some_chaos(results: Path) -> int:
    """Run the benchmark with few faults; its exit code."""
    output.RESULTS = results
    return chaos.main(["--faults", "5", "--seed", "3"])


@pytest.mark.slow
def test_faults_and_kills_are_survived(tmp_path: Path) -> None:
    """One run for real, on one rank."""
    done = forked(some_chaos, tmp_path, folder=tmp_path)
    assert done.code == 0, done.output
    record = json.loads((tmp_path / "chaos.json").read_text())
    alone = record["columns"]["loader, 1 rank"]
    assert sum(alone["faults"].values()) >= 5
    assert alone["worst"] <= chaos.WORST
    assert max(map(len, chaos.text(record).splitlines())) <= output.WIDTH
