"""Methods of single instances are replaced for a time."""

from typing import Any

import pytest

from lightning_ga.compat.patching import shadowed


class Loop:
    def run(self, value: int) -> str:
        """Return the value as text."""
        return f"own {value}"


def ours(value: int) -> str:
    return f"ours {value}"


def test_a_method_is_what_it_was_before_also_after_an_error() -> None:
    """Be that one of the class or one of others."""
    loop = Loop()
    with pytest.raises(ValueError, match="ours 1"), shadowed(loop, "run", ours):
        raise ValueError(loop.run(1))
    assert vars(loop) == {}
    loop.run = theirs = lambda value: f"theirs {value}"  # type: ignore[method-assign]
    with shadowed(loop, "run", ours):
        assert loop.run(2) == "ours 2"
    assert loop.run is theirs


def test_what_others_have_put_around_it_stays_and_meets_the_method_of_before() -> None:
    """So does what they put back that was there when they came."""
    loop: Any = Loop()
    with shadowed(loop, "run", ours):
        met = loop.run
        loop.run = lambda value: f"around {met(value)}"
        assert loop.run(1) == "around ours 1"
    assert loop.run(2) == "around own 2"
    loop.run = met
    assert loop.run(3) == "own 3"
