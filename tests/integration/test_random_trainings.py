"""Trainings that are drawn at random, beside a plain loop that takes each window in one pass.

``make fuzz SEEDS=500`` tries more of them, ``make fuzz SEEDS=500 FIRST=1000`` others. A failure prints what was drawn;
its seed draws it again: ``FIRST=17 SEEDS=1``.
"""

import os
import re
from pathlib import Path

import pytest
from random_training import (
    Course,
    Outcome,
    Recipe,
    covering,
    draw,
    draw_course_on_ranks,
    draw_courses,
    draw_on_ranks,
    ends_of,
    is_shared,
    is_trained,
    plain,
    train_course,
    train_on_ranks,
)
from texts import LONGEST

if "SEEDS" in os.environ:
    FIRST, COUNT = int(os.environ.get("FIRST", "0")), int(os.environ["SEEDS"])
    SEEDS = [seed for seed in range(FIRST, FIRST + COUNT) if is_trained(draw(seed))]
    FEWER = ON_RANKS = SEEDS[: max(1, COUNT // 3)]
else:
    # The last four begin with a batch of one sample or with a smaller one than others, and drop a batch or samples.
    SEEDS = [*covering(20, range(200), usable=is_trained), 9106, 9222, 20052, 73135]
    FEWER, ON_RANKS = [*SEEDS[::3], 9222], [*covering(6, range(200), usable=is_shared), 20387, 20559]


def error(ours: Outcome, oracle: Outcome) -> float:
    return float((ours.weights - oracle.weights).norm() / oracle.weights.norm())


def check(ours: Outcome, oracle: Outcome, shown: str) -> None:
    """Assert that a course is that of the plain loop, and show what was drawn if it is not."""
    __tracebackhide__ = True
    assert ours.windows == oracle.windows, shown
    assert error(ours, oracle) <= 1e-11, shown
    assert ours.rates == pytest.approx(oracle.rates, rel=1e-9), shown
    assert not ours.logged or ours.logged == [pytest.approx(each, rel=1e-5) for each in oracle.logged], shown


def run(recipe: Recipe, course: Course | None, folder: Path, shown: str) -> Outcome:
    try:
        return train_course(recipe, course, folder)
    except Exception as raised:
        raised.add_note(shown)
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_a_training_is_that_of_a_plain_loop(seed: int, tmp_path: Path) -> None:
    """Whole, cut, after errors of memory, and after a resume: windows, weights, rates, logs and buffers."""
    recipe = draw(seed)
    oracle = plain(recipe)
    for name, course in draw_courses(recipe, ends_of(recipe)).items():
        shown = f"\n{recipe}\n{name}: {course}"
        ours = run(recipe, course, tmp_path, shown)
        check(ours, oracle, shown)
        assert ours.seen == oracle.seen, shown
        assert ours.logged or course.then, shown
        last = course.then or course
        assert ours.largest <= last.micro * (LONGEST if recipe.by_size else 1), shown
        assert ours.cause in ("exact", "unmeasured", None), shown
        expected = "of one sample has no parts|have no two samples that stay" if recipe.broken else "of one sample has"
        assert not [text for text in ours.told if not re.search(expected, text)], shown
        assert not [text for text in ours.ran_out if "Its gradient is not" in text or "A hook had" in text], shown


@pytest.mark.parametrize("seed", FEWER)
def test_what_micro_batches_cannot_train_exactly_is_told(seed: int, tmp_path: Path) -> None:
    """A course is that of the plain loop, or it is said that it is not: never wrong in silence."""
    recipe = draw(seed, coupling=True)
    oracle = plain(recipe)
    for name, course in draw_courses(recipe, ends_of(recipe)).items():
        shown = f"\n{recipe}\n{name}: {course}"
        ours = run(recipe, course, tmp_path, shown)
        if error(ours, oracle) > 1e-9:
            assert ours.cause not in ("exact", None), shown
            assert ours.told or ours.ran_out or course.then, shown
            assert not any("The result is the same" in text for text in ours.ran_out), shown


@pytest.mark.distributed
@pytest.mark.parametrize("seed", ON_RANKS)
def test_ranks_train_as_a_plain_loop(seed: int, tmp_path: Path) -> None:
    """Two or three, with errors of memory, and on another number of ranks after a resume; all in the same way."""
    recipe = draw_on_ranks(seed)
    steps = min(len(plain(recipe, ranks).windows) for ranks in (1, 2, 3))  # drop_last leaves out others on each number
    course = draw_course_on_ranks(recipe, steps)
    shown = f"\n{recipe}\n{course}"
    every = train_on_ranks(recipe, course, tmp_path)
    for ours in every:
        check(ours, plain(recipe, course.ranks), shown)
        assert ours.weights.equal(every[0].weights), shown
