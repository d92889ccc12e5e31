"""The cause of a difference follows from the numbers alone."""

import pytest

from lightning_ga.fit.exactness.differences import Differences, judge
from lightning_ga.plan.exactness import Exactness

SUMMED = Differences(error=0.5, summed=0.0, best_weight=2.0, best_error=0.3)
WEIGHTED = Differences(error=0.5, summed=0.7, best_weight=0.3, best_error=0.0)
FOR_NOTHING = Differences(
    error=0.5, summed=0.0, best_weight=-1e-17, best_error=0.0
)  # the first part holds padding only
COUPLED = Differences(error=0.5, summed=0.7, best_weight=0.3, best_error=0.4)
NAN = float("nan")


@pytest.mark.parametrize(
    ("error", "alone", "noise", "besides", "cause", "measured"),
    [
        (1e-9, None, 0.0, {}, "exact", True),
        (1e-9, None, 0.0, {"layers": ("norm",)}, "exact", True),
        (1e-9, None, 0.0, {"tensors": ("queue",)}, "stateful", True),
        (1e-9, None, 1.0, {"tensors": ("queue",)}, "stateful", False),
        (1e-9, None, 1.0, {}, "random", False),
        (0.5, COUPLED, 1.0, {"layers": ("norm",)}, "batch_norm", False),
        (NAN, COUPLED, 0.0, {"layers": ("norm",)}, "batch_norm", False),
        (NAN, COUPLED, 0.0, {}, "coupled", False),
        (0.5, SUMMED, 0.0, {"layers": ("norm",)}, "sum", True),
        (0.5, FOR_NOTHING, 0.0, {}, "weighted", True),
        (0.5, COUPLED, 0.0, {"layers": ("norm",)}, "batch_norm", True),
        (0.5, WEIGHTED, 0.0, {}, "weighted", True),
        (0.5, COUPLED, 0.0, {}, "coupled", True),
    ],
)
def test_the_cause_is_named(error, alone, noise, besides, cause, measured):
    """State comes before noise, noise before the loss; a number is given unless noise hides it."""
    verdict = judge(Exactness(error, 1e-6, "exact", **besides), alone, noise=noise)
    assert verdict.cause == cause
    assert verdict.relative_error == (error if measured else None)
