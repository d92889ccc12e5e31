"""Random numbers are drawn again after a restore, whatever was drawn with which generator."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vendors import use_device

from lightning_ga.snapshot.random_numbers import RandomState, reseed

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


@settings(max_examples=5)
@pytest.mark.parametrize("name", DRAWS)
@given(st.lists(st.sampled_from([*DRAWS]), max_size=4), st.lists(st.sampled_from([*DRAWS]), max_size=4))
def test_what_was_drawn_is_drawn_again(name: str, before: list[str], attempt: list[str]) -> None:
    """In any order; a state is current until numbers are drawn, and again when it is restored."""
    reseed(1)  # not as the draws do
    for each in before:
        DRAWS[each]()
    state, first = RandomState(), drawn()
    for _ in range(2):
        state.restore()
        again = RandomState()
        for each in (name, *attempt):
            DRAWS[each]()
        again.restore()
        assert again.is_current()
        assert drawn() == first
        assert not again.is_current()


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64, np.random.Philox])
@pytest.mark.parametrize("kind", [np.random.RandomState, np.random.Generator])
def test_generators_of_numpy_are_seeded_and_put_back_with_any_bit_generator(bits: Any, kind: Any) -> None:
    """Also in the middle of a pair of normal numbers, of which the old kind keeps the second one."""
    generator = kind(bits(3))
    generator.standard_normal()
    state = RandomState([generator])
    first = generator.standard_normal(3).tolist()
    seeded = []
    for _ in range(2):
        assert not state.is_current()
        reseed(5, [generator])
        seeded.append(generator.standard_normal(3).tolist())
        state.restore()
        assert state.is_current()
        assert generator.standard_normal(3).tolist() == first
    assert seeded[0] == seeded[1] != first


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_numbers_of_every_kind_of_device_are_drawn_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With generators on the host in the place of the device's."""
    generators = use_device(kind, monkeypatch)
    state = RandomState()
    first = [torch.rand(3, generator=generator).tolist() for generator in generators]
    assert not state.is_current()
    state.restore()
    assert state.is_current()
    assert [torch.rand(3, generator=generator).tolist() for generator in generators] == first


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_seed_is_for_devices_in_use_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` queues one for a device that is used only later, in the place of the user's own."""
    generators = use_device(kind, monkeypatch)
    reseed(3)
    assert [generator.initial_seed() for generator in generators] == [3] * len(generators)
    monkeypatch.undo()
    queued = len(torch.cuda._queued_calls)
    reseed(4)
    assert [generator.initial_seed() for generator in generators] == [3] * len(generators)
    assert len(torch.cuda._queued_calls) == queued
    assert torch.initial_seed() == 4
