"""Every kind of accelerator is served alike, whichever is in use; none is started to find that out."""

from typing import Any

import pytest
import torch
from vendors import use_device

from lightning_ga.errors import UserError
from lightning_ga.memory.device import available_memory, total_memory
from lightning_ga.memory.oom import empty_caches
from lightning_ga.memory.vendors import vendor_of, vendors_in_use

KINDS = ["cuda", "xpu", "mps"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_to_ask_what_is_in_use_starts_no_device() -> None:
    assert list(vendors_in_use()) == []
    empty_caches()
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_in_use_is_emptied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # where there is one
    for each in KINDS:
        monkeypatch.setattr(getattr(torch, each), "empty_cache", lambda each=each: emptied.append(each))
    use_device(kind, monkeypatch)
    empty_caches()
    assert emptied == [kind]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_devices_in_use_are_those_that_hold_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, vendor = getattr(torch, kind), vendor_of(torch.device(kind))
    monkeypatch.setattr(backend, "device_count", lambda: 3)
    monkeypatch.setattr(backend, "memory_allocated", lambda place: [0, 8, 16][place])
    assert vendor is not None
    assert list(vendor.devices()) == [torch.device(kind, 1), torch.device(kind, 2)]


def test_the_memory_of_a_mac_is_what_the_driver_has_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less 5 % of the whole."""
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 8)
    vendor: Any = vendor_of(torch.device("mps"))
    assert list(vendor.devices()) == [torch.device("mps")]
    assert (available_memory("mps"), total_memory("mps")) == (700 - 50, 1000)


def test_a_kind_that_is_not_in_the_table_has_no_vendor() -> None:
    assert vendor_of(torch.device("cpu")) is None
    assert vendor_of(torch.device("hpu")) is None
    with pytest.raises(UserError, match="The memory of device 'hpu' cannot be read: give memory_budget in bytes"):
        total_memory("hpu")
