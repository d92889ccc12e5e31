import pytest
import torch

from lightning_ga import UserError
from lightning_ga.compat.ranks import settings_on_this_host


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
    changed, counted = settings_on_this_host(settings)
    assert changed == {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    assert counted == ranks


def test_half_precision_keeps_its_scaler():
    changed, _ = settings_on_this_host({"precision": "16-mixed"})
    assert changed["precision"] is None
    assert isinstance(changed["plugins"][0].scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", object()])
def test_sharded_models_are_refused(strategy: object):
    """They hold another part of the model on every rank."""
    with pytest.raises(UserError, match="only data parallelism"):
        settings_on_this_host({"strategy": strategy})
