"""Choosing is pure: peaks come from sums here, and every choice is judged against all sets."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recompute_programs import with_inner

from lightning_ga.recompute.choice import Candidate, ChosenSet, choose

STATE = 100  # bytes that no set frees


def tree(blocks: list[tuple[int, int]]) -> Candidate:
    """Blocks with what they free and their seconds."""
    inner = tuple(Candidate(f"blocks.{number}", frees, seconds) for number, (frees, seconds) in enumerate(blocks))
    return Candidate("", sum(each.frees for each in inner), sum(each.seconds for each in inner), inner)


def run_of(root: Candidate, budget: int):
    frees = {each.name: each.frees for each in with_inner(root)}

    def run(names: tuple[str, ...]) -> int | None:
        peak = STATE + root.frees - sum(frees[name] for name in names)
        return peak if peak <= budget else None

    return run


def chosen(root: Candidate, budget: int) -> ChosenSet:
    return choose(root, run_of(root, budget), budget)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=9), st.floats(0, 1))
def test_a_set_is_found_if_there_is_one_and_its_trial_has_fitted(blocks: list[tuple[int, int]], part: float) -> None:
    root = tree(blocks)
    budget = STATE + int(part * root.frees)
    found = chosen(root, budget)
    assert found.trials[found.names] == found.peak_bytes
    assert found.peak_bytes == STATE + root.frees - sum(blocks[int(name[-1])][0] for name in found.names) <= budget
    assert found.frees == STATE + root.frees - found.peak_bytes
    assert 1 <= len(found.trials) <= 8
    assert [*found.names] == sorted(found.names)
    assert found.share == pytest.approx(sum(blocks[int(name[-1])][1] for name in found.names) / root.seconds)


@given(st.integers(2, 12), st.floats(0.05, 0.95))
def test_of_equal_blocks_no_more_are_taken_than_are_needed(blocks: int, part: float) -> None:
    root = tree([(10, 1)] * blocks)
    budget = STATE + int(part * root.frees)
    run = run_of(root, budget)
    least = next(
        size
        for size in range(1, blocks + 1)
        for names in combinations(range(blocks), size)
        if run(tuple(f"blocks.{number}" for number in names)) is not None
    )
    assert len(chosen(root, budget).names) == least


def test_two_trials_tell_that_nothing_fits() -> None:
    """The second with larger parts, whose arguments are fewer; the lowest peak is told."""
    halves = tuple(
        Candidate(half, 50, 2, (Candidate(f"{half}.0", 20, 1), Candidate(f"{half}.1", 20, 1))) for half in ("a", "b")
    )
    root = Candidate("", 100, 4, halves)
    found = choose(root, run_of(root, 90), 90)
    assert found.names == ()
    assert [*found.trials] == [("a.0", "a.1", "b.0", "b.1"), ("a", "b")]
    assert found.peak_bytes is None


def test_the_cheapest_bytes_come_first() -> None:
    """Blocks 2 and 3 free four times as many bytes a second."""
    root = tree([(16, 4), (16, 4), (16, 1), (16, 1)])
    assert chosen(root, STATE + 32).names == ("blocks.2", "blocks.3")


def test_refused_submodules_are_not_chosen_but_their_parts_are() -> None:
    parts = (Candidate("block.one", 20, 1), Candidate("block.other", 20, 1))
    root = Candidate("", 80, 4, (Candidate("block", 40, 2, parts), Candidate("head", 40, 2)))
    assert [*root.chosen(1e9)] == ["block", "head"]
    refused = Candidate("", 80, 4, (Candidate("block", 40, 2, parts, refused=True), Candidate("head", 40, 2)))
    assert [*refused.chosen(1e9)] == ["block.one", "block.other", "head"]
    nothing = Candidate("", 80, 4, (Candidate("head", 40, 2, refused=True),))
    assert choose(nothing, run_of(nothing, 150), 150) == ChosenSet((), 0.0, 0, None, {})
