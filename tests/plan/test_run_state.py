"""What a checkpoint keeps comes back the same, through the strict way of loading."""

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.plan.records import Method, ProbeResult, Trial
from lightning_ga.plan.run_state import Position, RunState

NUMBERS, COUNTS = st.integers(0, 2**62), st.integers(1, 2**62)
TRIALS = st.builds(Trial, NUMBERS, NUMBERS, st.booleans(), st.floats(0, 1e6))
PROBES = st.builds(
    ProbeResult,
    COUNTS,
    COUNTS,
    NUMBERS,
    st.lists(TRIALS, max_size=4).map(tuple),
    NUMBERS,
    st.floats(0, 1e6),
    st.sampled_from(get_args(Method)),
)
STATES = st.builds(
    RunState, st.builds(Position, *[NUMBERS] * 6), st.sampled_from(["", "cpu 8 GiB", "µ\x00"]), st.none() | PROBES
)


@given(STATES)
def test_a_state_comes_back_as_it_was(state: RunState) -> None:
    assert RunState.from_dict(state.to_dict()) == state


@settings(max_examples=20)
@given(STATES.filter(lambda state: state.probe is not None))
def test_a_probe_of_another_version_is_forgotten_and_the_place_kept(state: RunState) -> None:
    kept = state.to_dict()
    kept["version"] = "0.0.1"
    assert RunState.from_dict(kept) == replace(state, probe=None)
