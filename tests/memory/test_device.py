"""Budgets, free memory and the limits of control groups."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_ga.errors import UserError
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.device import (
    available_memory,
    control_group_limits,
    enforced_budget,
    is_emulated,
    total_memory,
)
from lightning_ga.plan.config import Options
from lightning_ga.testing import limit_memory


def group(root: Path, folder: str, limit: str, used: str, cache: str, *, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file 7\n{cache}\n")


def member(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_control_groups_of_version_2_count_with_their_parents(tmp_path: Path) -> None:
    member(tmp_path, "0::/slurm/job/step\n")
    group(tmp_path, "slurm/job/step", "max", "900", "", version=2)
    group(tmp_path, "slurm/job", "1000", "907", "", version=2)
    group(tmp_path, "slurm", "5000", "2007", "", version=2)
    assert control_group_limits(tmp_path) == [(1000, 900), (5000, 2000)]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    """Their largest number means no limit, as having none does."""
    assert control_group_limits(tmp_path) == []
    member(tmp_path, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    group(tmp_path, "memory", "1000", "600", "total_inactive_file 100", version=1)
    assert control_group_limits(tmp_path) == [(1000, 500)]
    group(tmp_path, "memory", str(2**63 - 4096), "600", "", version=1)
    assert control_group_limits(tmp_path) == []


def test_a_cpu_has_what_the_smaller_of_machine_and_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ga.memory.device.control_group_limits", lambda: [(1000, 400), (10**18, 0)])
    assert available_memory("cpu") == 600
    assert total_memory("cpu") == 1000
    monkeypatch.setattr("lightning_ga.memory.device.control_group_limits", lambda: [])
    assert 0 < available_memory("cpu") <= total_memory("cpu") == psutil.virtual_memory().total


def test_limit_memory_stands_for_the_device() -> None:
    assert not is_emulated("cpu")
    with limit_memory(10_000):
        kept = torch.zeros(100)
        assert is_emulated("cpu")
        assert (available_memory("cpu"), total_memory("cpu")) == (9_600, 10_000)
    with limit_memory(10_000, device="cuda"):
        assert not is_emulated("cpu")
    del kept


def test_an_allocator_without_statistics_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a user has plugged in; a fixed micro-batch trains on it."""
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "pluggable")
    device = torch.device("cuda", 0)
    for use in (AllocatorMeter, available_memory):
        with pytest.raises(UserError, match="give a fixed micro_batch_size"):
            use(device)
    with pytest.raises(UserError, match="no memory_budget be kept"), enforced_budget(device, 100):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_meter_and_enforced_budget() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    meter = AllocatorMeter(device)
    before = meter.allocated()
    meter.start()
    kept = torch.zeros(2**20, device=device)
    assert meter.finish() == (before + 2**22, True)
    del kept
    budget = torch.cuda.memory_reserved(device) + 2**28
    with enforced_budget(device, budget):
        meter.start()
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2**29, dtype=torch.uint8, device=device)
        peak, undisturbed = meter.finish()
    assert peak <= budget
    assert not undisturbed
    torch.zeros(2**29, dtype=torch.uint8, device=device)
    assert 0 < available_memory(device) < total_memory(device)


@pytest.mark.parametrize(("name", "undisturbed"), [("num_ooms", False), ("num_alloc_retries", False), ("other", True)])
def test_a_cuda_step_fits_only_if_the_allocator_had_no_trouble(monkeypatch, name, undisturbed):
    stats = {"num_ooms": 3, "num_alloc_retries": 5, "other": 7}
    for function in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, function, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1234)
    meter = AllocatorMeter(torch.device("cuda"))
    meter.start()
    stats[name] += 1
    assert meter.finish() == (1234, undisturbed)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of a CUDA device of 1,000 bytes that this process may reserve, one after another; 600 are free."""
    shares = [1.0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    return shares


@pytest.mark.parametrize(("budget", "during"), [("250B", [1.0, 0.2505]), (None, [1.0])])
def test_a_run_holds_a_cuda_device_to_its_budget(fractions, budget, during):
    from lightning_ga.fit.fit import Fit

    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    run: Any = SimpleNamespace(
        trainer=trainer, _options=Options(budget), parts=SimpleNamespace(undo_at_end=ExitStack())
    )
    Fit._hold_to_budget(run)
    assert fractions == during
    run.parts.undo_at_end.close()
    assert fractions[-1] == 1.0


def test_cuda_memory_and_the_fraction_that_enforces_a_budget(fractions: list[float]) -> None:
    device = torch.device("cuda", 0)
    assert (available_memory(device), total_memory(device)) == (600 + 200 - 9, 1000)
    with enforced_budget(device, 250):
        assert fractions == [1.0, 0.2505]  # CUDA cuts 250.5 bytes off to 250
        assert available_memory(device) == 250 - 100
    assert fractions == [1.0, 0.2505, 1.0]


def test_a_fraction_that_the_user_has_set_stays(fractions: list[float]) -> None:
    """It is less than the device has free, and a larger budget does not lift it."""
    device = torch.device("cuda", 0)
    fractions.append(0.4)
    assert available_memory(device) == 400 - 100
    for budget, fraction in ((700, 0.4), (200, 0.2005)):
        with enforced_budget(device, budget):
            assert fractions[-1] == fraction
    assert fractions[-1] == 0.4
