"""What a checkpoint keeps comes back the same, through the strict way of loading."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.plan.checkpoint import Position, RunState
from lightning_ga.plan.records import Method, ProbeResult, Trial

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
STATES = st.builds(RunState, st.builds(Position, NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.text(), st.none() | PROBES)


@given(STATES)
def test_a_state_comes_back_as_it_was(state: RunState) -> None:
    assert RunState.from_dict(state.to_dict()) == state


def test_a_state_loads_with_weights_only(tmp_path: Path) -> None:
    """A checkpoint holds plain values, so that loading it runs no code."""
    trial = Trial(micro_batch_size=4, peak_bytes=1000, fits=True, seconds=0.5)
    probe = ProbeResult(4, 2000, 1000, (trial, trial), 4, 1.5, "replay")
    state = RunState(Position(seed=2**40, epoch=3, samples_done=96, batches_before=12), "cpu 8 GiB", probe)
    torch.save({"callbacks": state.to_dict()}, tmp_path / "last.ckpt")
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert RunState.from_dict(loaded) == state
    assert loaded["version"] == 1


@settings(max_examples=20)
@given(STATES.filter(lambda state: state.probe is not None))
def test_a_probe_of_another_version_is_forgotten_and_the_place_kept(state: RunState) -> None:
    kept = state.to_dict()
    kept["probe"]["method"] = "a way of looking that is unknown here"
    assert RunState.from_dict(kept) == replace(state, probe=None)
