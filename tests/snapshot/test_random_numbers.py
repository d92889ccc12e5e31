"""Random numbers are drawn again after a restore, whatever was drawn with which generator."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.snapshot import random_numbers
from lightning_ga.snapshot.random_numbers import RandomState

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, one of a pair": lambda: random.gauss(0, 1),
    "python, all words": lambda: random.getrandbits(32 * 624),
    "python, seeded": lambda: random.seed(7),
    "numpy": np.random.rand,
    "numpy, one of a pair": np.random.randn,
    "numpy, all words": lambda: np.random.bytes(4 * 624),
    "numpy, seeded": lambda: np.random.seed(7),
    "torch": lambda: torch.rand(3),
    "torch, one of a pair": lambda: torch.randn(()),
    "torch, one of a pair, double": lambda: torch.randn((), dtype=torch.float64),
    "torch, all words": lambda: torch.rand(624),
    "torch, seeded": lambda: torch.default_generator.manual_seed(7),
}


def drawn() -> list[float]:
    """What comes next."""
    numbers = [random.random(), random.gauss(0, 1), random.gauss(0, 1)]
    return [
        *numbers,
        *np.random.rand(2),
        np.random.randn(),
        np.random.randn(),
        *torch.randn(2).tolist(),
        *torch.rand(2).tolist(),
    ]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*DRAWS]), max_size=4), st.lists(st.sampled_from([*DRAWS]), max_size=4))
def test_what_was_drawn_is_drawn_again(before: list[str], attempt: list[str]) -> None:
    """States are read in full only where memory shows a draw: none may be missed, in any order."""
    for name in before:
        DRAWS[name]()
    state, first = RandomState(), drawn()
    for _ in range(2):
        state.restore()
        again = RandomState()
        for name in attempt:
            DRAWS[name]()
        again.restore()
        assert drawn() == first


def test_the_memory_of_generators_is_laid_out_as_expected() -> None:
    """On CPython and NumPy as they are tested here; elsewhere states are read in full."""
    assert random_numbers._WATCHES == (True, True)


def test_states_are_read_only_where_something_was_drawn() -> None:
    """To read them takes long; what was not drawn from is the state that was read before."""
    before, states = RandomState(), ("_numpy", "_python")
    assert all(getattr(RandomState(), name) is getattr(before, name) for name in states)
    for draw, name in ((np.random.rand, "_numpy"), (random.random, "_python")):
        draw()
        now = RandomState()
        assert [key for key in states if getattr(now, key) is not getattr(before, key)] == [name]
        before = now


@pytest.mark.parametrize("name", ["_python", "_numpy"])
def test_generators_whose_memory_is_not_known_are_read_in_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is on another Python, or with another generator in NumPy."""
    monkeypatch.setattr(getattr(random_numbers, name), "_lies_in", tuple)
    state, first = RandomState(), drawn()
    state.restore()
    assert drawn() == first


@pytest.mark.filterwarnings("ignore:get_state and legacy can only be used with the MT19937 BitGenerator")
def test_another_generator_that_numpy_was_given_is_read_in_full() -> None:
    """Its memory is laid out otherwise, and may be shorter."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state, first = RandomState(), np.random.rand(3).tolist()
        state.restore()
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(before)


def test_a_seed_does_not_wait_for_a_device_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` queues one for it, which would take the place of the user's own."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    random_numbers.reseed(3)
    first, queued = torch.rand(1), list(seeds)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    random_numbers.reseed(3)
    assert torch.equal(first, torch.rand(1))
    assert (queued, seeds) == ([], [3])
