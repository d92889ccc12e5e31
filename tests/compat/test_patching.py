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
    """What others have put around it meanwhile stays, and meets the method of before."""
    loop: Any = Loop()
    with pytest.raises(ValueError, match="ours 1"), shadowed(loop, "run", ours):
        raise ValueError(loop.run(1))
    assert vars(loop) == {}
    with shadowed(loop, "run", ours):
        met = loop.run
        loop.run = lambda value: f"around {met(value)}"
        assert loop.run(1) == "around ours 1"
    assert loop.run(2) == "around own 2"
