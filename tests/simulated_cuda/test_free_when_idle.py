"""What training under ``AutoAccumulate`` asks of a CUDA device beside stock Lightning, when memory suffices.

PyTorch's own kernels are launched on the simulated device, and counted; they compute nothing.
"""

from pathlib import Path

import device_counters
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
if device_counters.is_loaded():
    from counted import Deep, Metered, Scheduled, Seen, Toggled, train, train_as_rank
    from forks import forked, in_ranks

RANKS, MODES = 2, (None, "loader", "step")


def waits_no_more(ours: "Seen", stock: "Seen") -> None:
    """No wait and no question more than stock Lightning; pieces of metrics are put together by more launches."""
    for name in ("waits", "copies_to_host", "memory_queries"):
        assert getattr(ours.counts, name) <= getattr(stock.counts, name), name


def asks_no_more(ours: "Seen", stock: "Seen") -> None:
    """No wait, no copy and no question about memory more than stock Lightning, and 1 % of launches."""
    waits_no_more(ours, stock)
    for name in ("copies_from_host", "copies_on_device", "mallocs"):
        assert getattr(ours.counts, name) <= getattr(stock.counts, name), name
    assert ours.counts.products == stock.counts.products > 0
    assert ours.counts.launches <= 1.01 * stock.counts.launches, (ours.launches - stock.launches).most_common()


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_window_asks_no_more_of_the_device(norm: type[nn.Module], precision: str) -> None:
    stock = train(norm, precision, None)
    for mode in MODES[1:]:
        asks_no_more(train(norm, precision, mode), stock)


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize("what", ["clipped", "averaged", "scheduled", "toggled", "metered"])
def test_a_window_of_other_programs_asks_no_more_either(what: str) -> None:
    """Clipping of scaled gradients, averages of weights, schedules of several groups, parts by turns, metrics."""
    kind = {"scheduled": Scheduled, "toggled": Toggled, "metered": Metered}.get(what, Deep)
    settings = {"gradient_clip_val": 0.1} if what == "clipped" else {}
    precision = "16-mixed" if what == "clipped" else "32-true"

    def seen(mode: str | None) -> "Seen":
        callbacks = [EMAWeightAveraging()] if what == "averaged" else []
        return train(nn.LayerNorm, precision, mode, 1, *callbacks, kind=kind, **settings)

    stock = seen(None)
    for mode in MODES[1:]:
        check = waits_no_more if what == "metered" else asks_no_more
        check(seen(mode), stock)


@pytest.mark.distributed
def test_a_rank_asks_no_more_of_its_device(tmp_path: Path) -> None:
    """Two gloo ranks, which exchange gradients through the host's memory, as stock Lightning's do."""
    for mode in MODES:
        ended = forked(
            in_ranks,
            *(RANKS, train_as_rank, RANKS, mode, tmp_path),
            environment={"SIMULATED_CUDA_DEVICES": str(RANKS)},
            folder=tmp_path,
        )
        assert ended.code == 0, ended.output
    for rank in range(RANKS):
        seen = {mode: torch.load(tmp_path / f"{mode}-{rank}.pt", weights_only=False) for mode in MODES}
        for mode in MODES[1:]:
            asks_no_more(seen[mode], seen[None])
