"""Names of weights, without a model."""

import pytest

from lightning_ga.plan.audit_verdicts import Audit, AuditStep, judge


def step(*weights: float, sizes: tuple[float, ...] = (), norm: float = 1.0, detail: str = "") -> AuditStep:
    sizes = sizes or (8.0,) * len(weights)
    wanted = tuple(size / sum(sizes) for size in sizes)
    numbers = (*range(1, len(weights) + 1),)
    return AuditStep(numbers, weights, wanted, sizes, 0.0, norm, detail=detail)


WHOLE = step(0.25, 0.25, 0.25, 0.25, norm=0.5)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (WHOLE, "mean over samples"),
        (step(1.0, 1.0, 1.0, 1.0), "sum"),
        (step(8.0, 8.0, 8.0, 8.0), "sum"),
        (step(0.25, 0.25, 0.25), "last window divided by the factor"),
        (step(0.25, 0.0625, sizes=(8.0, 2.0)), "last window divided by the factor"),
        (step(0.25, 0.25, 0.25, 0.25, 0.25), "carried over"),
        (step(0.25, 0.25, 0.25, 0.25, sizes=(8.0, 8.0, 8.0, 2.0)), "mean over micro-batches"),
        (step(0.0, 0.0, 0.0, 0.25), "only the last"),
        (step(0.25, 0.0, 0.25, 0.25), "dropped"),
        (step(0.0, 0.0), "dropped"),
        (step(0.5, 0.25, 0.125, 0.125), "other weights"),
        (step(0.5, -0.5), "other weights"),
        (step(0.1, 0.1, 0.1, 0.1, detail="noise"), "not a combination"),
    ],
)
def test_each_kind_of_weights_has_a_name(found: AuditStep, verdict: str) -> None:
    """Beside whole windows of four, which are right."""
    audit = judge([WHOLE, WHOLE, found, step(0.25, 0.25, 0.25, 0.25, norm=2.0)])
    assert audit.steps[2].verdict == verdict
    assert audit.verdict == verdict
    assert audit.is_right == (verdict == "mean over samples")


def test_a_common_norm_is_clipping_and_a_common_scale_is_not() -> None:
    """Clipping never makes a gradient larger, nor leaves a larger one than those that it has scaled."""
    clipped = [step(0.2, 0.2, 0.2, 0.2), step(0.1, 0.1, 0.1, 0.1, norm=1.0002)]
    assert judge([*clipped, WHOLE]).is_right
    assert judge([step(0.2, 0.2, 0.2, 0.2), step(0.2, 0.2, 0.2, 0.2, norm=1.5)]).verdict == "scaled"
    assert judge([*clipped, step(0.25, 0.25, 0.25, 0.25, norm=1.5)]).verdict == "scaled"
    assert judge([step(0.5, 0.5, 0.5, 0.5), step(0.4, 0.4, 0.4, 0.4), WHOLE]).verdict == "sum"
    assert judge([step(0.2, 0.2, 0.2, 0.2)]).verdict == "scaled"


def test_a_sum_over_ranks_is_averaged_over_them() -> None:
    assert judge([step(0.5, 0.5, 0.5, 0.5)], ranks=2).verdict == "sum"


def test_the_factor_is_that_of_windows_that_are_right() -> None:
    """A window that carries another over is as frequent here."""
    assert judge([WHOLE, step(*(0.25,) * 7)]).factor == 4
    assert judge([step(0.5, 0.5)], factor=4).factor == 4


def test_micro_batches_of_no_step_are_dropped() -> None:
    audit = judge([WHOLE], dropped=[9, 10, 11])
    assert not audit.is_right
    assert audit.verdict == "dropped"
    assert str(audit).splitlines()[-1].split(maxsplit=3) == ["–", "9-11", "0", "dropped: no step uses them"]


def test_the_table_is_short_however_many_micro_batches_there_are() -> None:
    audit: Audit = judge([step(*(1 / 64,) * 64)])
    assert max(map(len, str(audit).splitlines())) < 80
    assert "1-64           0.016 0.016 … 0.016" in str(audit)
