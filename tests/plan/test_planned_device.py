import pytest

from lightning_ga import UserError
from lightning_ga.plan.planned_device import CONTEXT, MARGIN, WORKSPACE, current_device, planned_device


def test_a_device_is_planned_for_within_its_context_only():
    assert current_device() is None
    with planned_device("16GiB") as outer:
        with planned_device("8GiB") as inner:
            assert current_device() is inner
        assert current_device() is outer
    assert current_device() is None


def test_what_no_tensor_can_use_comes_off_its_memory():
    """Context, workspace, margin and buckets; what the user leaves bounds the rest."""
    with planned_device("16GiB") as device:
        left = device.budget(None, buckets=1000)
        assert left == device.total_bytes - device.reserved_bytes
        assert device.reserved_bytes == CONTEXT + WORKSPACE + int(MARGIN * 2**34) + 1000
        assert device.budget("1GiB") == 2**30
        assert device.budget(0.5) == 2**33
        assert device.budget(1.0) < 2**34


def test_a_device_that_leaves_nothing_is_refused():
    with planned_device("300MiB") as device, pytest.raises(UserError, match=r"314,572,800 bytes leaves nothing"):
        device.budget(None)
