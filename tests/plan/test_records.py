"""How long what a probe has found holds."""

from dataclasses import replace

import pytest

from lightning_ga.plan.records import ProbeResult, Trial, still_holds

LINE = tuple((size, 100 + 10 * size) for size in range(1, 113))
FOUND = ProbeResult(90, 1005, 1000, (), 3, 0.0, "replay", curve=LINE)
REFUSED = replace(FOUND, curve=(), trials=(Trial(91, 1010, False, 0.0),))
FALLING = replace(FOUND, curve=((90, 1000), (91, 1010), (92, 1004)))
FAILED = replace(FOUND, curve=((90, 1000), (91, 1004)), trials=(Trial(92, 1006, False, 0.0),))
BOUNDED = ProbeResult(64, 1005, 740, (Trial(64, 740, True, 0.0),), 3, 0.0, "replay", curve=((64, 740), (80, 900)))
BELOW = ProbeResult(100, 1005, 990, (), 3, 0.0, "replay", curve=((100, 990), (101, 1000), (104, 1030), (130, 1300)))


@pytest.mark.parametrize(
    ("found", "budget", "high", "holds"),
    [
        pytest.param(FOUND, 1005, 512, True, id="the same"),
        pytest.param(FOUND, 1009, 512, True, id="a little more, not enough for one sample"),
        pytest.param(FOUND, 1025, 512, True, id="two percent more"),
        pytest.param(FOUND, 1030, 512, False, id="more"),
        pytest.param(FOUND, 999, 512, False, id="less"),
        pytest.param(FOUND, 5000, 60, True, id="more than is asked for"),
        pytest.param(REFUSED, 1009, 512, True, id="a trial failed: a little more"),
        pytest.param(REFUSED, 1030, 512, False, id="a trial failed: more"),
        pytest.param(BELOW, 1005, 512, True, id="a search on an allocator ends a little before"),
        pytest.param(replace(BELOW, curve=((100, 500), (101, 505), (125, 625))), 1005, 512, False, id="far before"),
        pytest.param(FALLING, 1005, 512, True, id="one sample more does not fit, two more would"),
        pytest.param(FALLING, 1100, 512, False, id="more, and a curve that falls"),
        pytest.param(FAILED, 1005, 512, True, id="a trial failed in spite of the prediction"),
        pytest.param(FAILED, 1100, 512, False, id="more, and such a trial"),
        pytest.param(BOUNDED, 1005, 64, True, id="as much was asked for"),
        pytest.param(BOUNDED, 1005, 65, False, id="no more was asked for then"),
    ],
)
def test_an_earlier_result_holds_while_its_limit_does(found: ProbeResult, budget: int, high: int, holds: bool) -> None:
    assert still_holds(found, budget, high) == holds
