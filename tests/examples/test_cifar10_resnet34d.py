"""What the recipe shows, on a small network and a few digits."""

from pathlib import Path

import pytest

from examples.reproduce import cifar10_resnet34d as recipe

SMALL = ("data=digits", "data.val_fraction=0.92", "data.image_size=32", "model.name=resnet10t", "lr_scheduler=none")
OVERRIDES = [*SMALL, "trainer.max_epochs=2", "trainer.limit_val_batches=2", "test=false"]


@pytest.mark.slow
def test_what_the_usual_script_logs_is_no_validation_loss(tmp_path: Path) -> None:
    found = recipe.usual(tmp_path, ["experiment=cifar10_resnet34d_8x4", *OVERRIDES], epochs=2, validated=2)
    steps = [step for step, _ in found.curves["val"]]
    assert steps == [step for step, _ in found.curves["logged"]] == [3, 6]
    assert found.values["logged"] != pytest.approx(found.values["val"], rel=0.01)
