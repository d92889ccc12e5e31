from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from lightning_ga.app.plots import draw_memory, loss_figure, probe_figure, step_figure
from lightning_ga.app.run_files import read_curves
from lightning_ga.plan.records import ProbeResult, Timing, Trial

MIB, GIB = 2**20, 2**30
TRIALS = (Trial(4, 20 * MIB, True, 0.1), Trial(8, 30 * MIB, True, 0.1), Trial(31, 90 * MIB, False, 0.1))
CURVE = ((1, 12 * MIB), (30, 85 * MIB), (31, 88 * MIB), (37, 103 * MIB))
FOUND = ProbeResult(30, 86 * MIB, 85 * MIB, TRIALS, 4, 0.5, "replay", curve=CURVE)


def drawn(draw, probe: ProbeResult):
    """Axes with the probe on them."""
    axes = Figure().subplots()
    draw(axes, probe)
    return axes


def names(axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_curves_are_read_by_step_and_drawn(tmp_path):
    """Empty cells are skipped; a log without losses draws nothing."""
    log = tmp_path / "metrics.csv"
    log.write_text("epoch,step,train/loss,val/loss\n0,4,1.5,\n0,9,,1.0\n1,14,0.5,\n")
    curves = read_curves(log)
    assert curves == {"train/loss": [(4, 1.5), (14, 0.5)], "val/loss": [(9, 1.0)]}
    figure = loss_figure({"run": curves})
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].lines][-1] == "validation"
    assert figure.axes[0].get_title() == "Loss"
    long = loss_figure({"run": {"train/loss": [(step, float(step % 3)) for step in range(40)]}})
    assert long is not None
    assert (len(long.axes[0].lines), long.axes[0].get_title()) == (2, "Loss; thick lines are moving means")
    assert loss_figure({"run": {}}) is None


@pytest.mark.parametrize("source", ["probe", "cache", "checkpoint", "estimate"])
def test_a_picture_of_the_probe_is_made_of_whatever_there_is(tmp_path, source):
    timed = replace(FOUND, source=source, timings=(Timing(8, 4, 1.0),), fastest=8)
    for probe in (timed, replace(timed, curve=(), trials=()), replace(timed, timings=(), fastest=None)):
        probe_figure(probe).savefig(tmp_path / "probe.png")
        assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_curve_trials_budget_and_limit():
    """Each once, in MiB, and by name."""
    axes = drawn(draw_memory, FOUND)
    assert names(axes) == ["predicted peak", "measured, fits", "does not fit", "limit: 30, 85.0 MiB"]
    curve, budget = axes.get_lines()
    assert [list(values) for values in curve.get_data()] == [[1, 30, 31, 37], [12, 85, 88, 103]]
    assert list(budget.get_ydata()) == [86, 86]
    fits, refused, limit = (points.get_offsets().tolist() for points in axes.collections)
    assert (fits, refused, limit) == ([[4, 20], [8, 30]], [[31, 90]], [[30, 85]])
    assert words(axes) == ["budget 86.0 MiB"]
    assert axes.get_ylabel() == "peak memory, MiB"
    assert axes.get_xlim()[1] > 37
    assert axes.get_ylim()[1] > 103


def test_a_budget_far_above_all_else_is_told_and_not_drawn():
    axes = drawn(draw_memory, replace(FOUND, budget_bytes=80 * GIB))
    assert words(axes) == ["budget 80.0 GiB, far above"]
    assert axes.get_ylim()[1] < 200


BATCHES = {"effective_batch_size": [(0, 16.0), (5, 32.0)], "accumulate_grad_batches": [(0, 2.0), (5, 2.0)]}
NOISE = {"noise_scale": [(3, 40.0), (4, 50.0)], "noise_scale_error": [(3, 10.0), (4, 5.0)]}


@pytest.mark.parametrize(
    ("curves", "shown"),
    [
        ({"train/loss": [(0, 1.0), (1, 0.5)]}, {}),
        ({"effective_batch_size": [(0, 8.0), (1, 8.0)], "lr-Adam": [(0, 0.1), (1, 0.1)]}, {}),
        (BATCHES, {"samples": ["effective batch"]}),
        (NOISE, {"samples": ["effective batch", "noise scale"]}),  # beside the batch of the plan
        (
            {"lr-Adam/pg1": [(0, 0.1), (1, 0.2)], "lr-Adam/pg2": [(0, 0.1), (1, 0.2)]},
            {"learning rate": ["lr-Adam/pg1"]},
        ),
        (
            {"lr-Adam": [(0, 9.0), (1, 8.0)], "learning_rate": [(0, 0.1), (1, 0.2)], "learning_rate/1": [(0, 1.0)]},
            {"learning rate": ["learning_rate", "learning_rate/1"]},  # as scaled, not as the scheduler set it
        ),
    ],
)
def test_what_changes_by_step_is_drawn(curves, shown):
    """Nothing that is not logged, or stays as it is."""
    figure = step_figure(curves, batch=64)
    axes = figure.axes if figure is not None else []
    assert {each.get_ylabel(): [line.get_label() for line in each.lines] for each in axes} == shown
