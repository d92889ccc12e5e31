"""Training after a probe and a check is bit for bit the training with the same micro-batch and neither."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import difference, fp16_on_the_cpu, run
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.loading.samples import collate_samples
from lightning_ga.snapshot.state import TensorValues


@pytest.mark.parametrize(
    ("settings", "budget"),
    [({"gradient_clip_val": 0.1}, "120KB"), ({"plugins": fp16_on_the_cpu}, "60KB")],
    ids=["clipped", "fp16"],
)
def test_a_probe_leaves_no_trace(settings: dict[str, Any], budget: str, tmp_path: Path) -> None:
    """Weights, optimizer, scaler, schedule, random numbers, metrics, log files, callbacks, counters and loops."""

    def made() -> dict[str, Any]:
        return {key: value() if callable(value) else value for key, value in settings.items()}

    probed = AutoAccumulate(memory_budget=budget, batch_norm="ignore", cache=False)
    after_probe = run(tmp_path / "probed", probed, workers=2, **made())
    assert probed.probe is not None
    assert probed.plan.factor > 1
    fixed = AutoAccumulate(micro_batch_size=probed.probe.limit, batch_norm="ignore")
    assert difference(after_probe, run(tmp_path / "fixed", fixed, workers=2, **made())) is None


@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    with_check = run(tmp_path / "with", AutoAccumulate(micro_batch_size=5))
    without = run(tmp_path / "without", AutoAccumulate(micro_batch_size=5, verify=False))
    assert difference(with_check, without) is None


@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_the_check_leaves_no_trace_where_memory_runs_out_as_it_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = run(tmp_path / "without", AutoAccumulate(micro_batch_size=5, verify=False))
    restore, attempts = TensorValues.restore, count()

    def fails_at_first(values: TensorValues) -> None:
        if (number := next(attempts)) > 9 and number % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        restore(values)

    monkeypatch.setattr(TensorValues, "restore", fails_at_first)
    assert difference(run(tmp_path / "with", AutoAccumulate(micro_batch_size=5)), without) is None
    assert next(attempts) > 10


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["coo", "csr", "conjugate"])
def test_buffers_that_are_not_dense_are_kept(kind: str) -> None:
    """The adjacency of a graph, say: with a probe, the check of exactness and a guard against errors of memory."""
    module, eye = Regression(), torch.eye(3)
    made = {"coo": eye.to_sparse, "csr": eye.to_sparse_csr, "conjugate": lambda: eye.to(torch.complex64).conj()}
    module.register_buffer("adjacency", made[kind]())
    callback = AutoAccumulate(8, max_micro_batch_size=4, cache=False)
    fit(DataLoader(Samples(32), batch_size=8), callback, module=module, max_epochs=1)
    assert callback.plan.factor == 2
    assert torch.equal(module.adjacency.to_dense().real, eye)


class Adaptive(Regression):
    """Without a schedule, through which its optimizer would be found as well."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_an_optimizer_without_a_schedule_begins_anew() -> None:
    weights = []
    for found in ("auto", 4):
        module, callback = Adaptive(), AutoAccumulate(8, micro_batch_size=found, max_micro_batch_size=4, cache=False)
        fit(DataLoader(Samples(32), batch_size=8), callback, module=module, max_epochs=1)
        weights.append(list(module.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_collate_function_draws_on_a_device_comes_back() -> None:
    """Where samples are looked at, apart from training; the seed alone decides what it draws, as on the host."""
    loader = DataLoader(Samples(4), collate_fn=lambda samples: torch.rand(len(samples), device="cuda"))
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    first, again, other = (collate_samples(loader, [0, 1], 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
