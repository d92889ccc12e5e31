"""What the recipe shows, on a small network and a few digits."""

from pathlib import Path

import pytest

from examples.reproduce import cifar10_resnet34d as recipe

SMALL = ("data=digits", "data.val_fraction=0.92", "data.image_size=32", "model.name=resnet10t", "lr_scheduler=none")
OVERRIDES = [*SMALL, "trainer.max_epochs=2", "trainer.limit_val_batches=2", "test=false"]


def test_what_the_usual_script_logs_is_no_validation_loss(tmp_path: Path) -> None:
    found = recipe.usual(tmp_path, ["experiment=cifar10_resnet34d_8x4", *OVERRIDES], epochs=2, validated=2)
    steps = [step for step, _ in found.curves["val"]]
    assert steps == [step for step, _ in found.curves["logged"]] == [3, 6]
    assert found.values["logged"] != pytest.approx(found.values["val"], rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accumulation is not exact for this model")  # it is what is measured
@pytest.mark.parametrize(("group_norm", "exact"), [(False, False), (True, True)])
def test_batch_norm_is_what_8_times_4_changes(group_norm: bool, exact: bool, tmp_path: Path) -> None:
    """With GroupNorm the gradient is that of the 32 samples, and so are the losses."""
    norm = [*OVERRIDES, "trainer.max_epochs=1", f"model.group_norm={str(group_norm).lower()}"]
    whole, cut = (
        recipe.ours(folder, [f"experiment=cifar10_resnet34d{name}", *norm])
        for folder, name in ((new(tmp_path / "whole"), ""), (new(tmp_path / "cut"), "_8x4"))
    )
    assert (whole.values["micro_batches"], cut.values["micro_batches"]) == ("32", "8 × 4")
    assert whole.values["error"] is None
    assert (cut.values["error"] < 1e-5) == exact
    assert (cut.values["train"] == pytest.approx(whole.values["train"], rel=1e-3)) == exact


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder
