import pytest
import torch

from lightning_ga import UserError
from lightning_ga.probe.planned.device import (
    CONTEXT,
    MARGIN,
    WORKSPACE,
    current_device,
    planned_device,
    read_device_memory,
    settings_on_this_host,
)


def test_a_device_is_planned_for_within_its_context_only():
    """And the inner one where two are nested."""
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


def test_a_cpu_of_that_size_has_nothing_set_aside():
    """To be compared with ``limit_memory``."""
    with planned_device(1000, like_cuda=False) as device:
        assert (device.budget(None), device.rounding) == (1000, 1)


def test_a_device_that_leaves_nothing_is_refused():
    """With what takes it."""
    with planned_device("300MiB") as device, pytest.raises(UserError, match=r"314,572,800 bytes leaves nothing"):
        device.budget(None)


@pytest.mark.parametrize("wrong", ["much", "", 0, -1, 0.5, True, "80%", None, [16]])
def test_a_memory_that_cannot_be_read_is_refused(wrong: object):
    """A share has no meaning: there is no device to take it of."""
    with pytest.raises(UserError, match=r"device_memory=.+ must be a whole number of bytes .*'16GiB'"):
        read_device_memory(wrong)


def test_doubts_are_kept_once():
    """In the order in which they came up."""
    with planned_device("16GiB") as device:
        for reason in ("a", "b", "a"):
            device.doubt(reason)
    assert device.unreliable == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 1),
        ({"accelerator": "gpu", "devices": 8, "num_nodes": 2, "strategy": "ddp"}, 16),
        ({"devices": "auto"}, 1),
        ({"devices": "4"}, 4),
        ({"devices": "0,1,"}, 2),
        ({"devices": [0, 3], "strategy": "ddp_find_unused_parameters_true"}, 2),
        ({"devices": -1, "strategy": None}, 1),
    ],
)
def test_a_trainer_for_another_machine_is_one_process_here(settings: dict[str, object], ranks: int):
    """That stands for one of its ranks."""
    changed, counted = settings_on_this_host(settings)
    assert changed == {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    assert counted == ranks


def test_half_precision_keeps_its_scaler():
    """Lightning would turn it into bfloat16 on a CPU."""
    changed, _ = settings_on_this_host({"precision": "16-mixed"})
    assert changed["precision"] is None
    assert isinstance(changed["plugins"][0].scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", object()])
def test_sharded_models_are_refused(strategy: object):
    """They hold another part of the model on every rank."""
    with pytest.raises(UserError, match="only data parallelism"):
        settings_on_this_host({"strategy": strategy})
