from omegaconf import OmegaConf

from lightning_ga.app.settings import direction_of, shown, unread_groups

LARGER = "val/acc val/Accuracy acc@1 val/top5 val_f1 val/F1Score val/MulticlassAUROC map_50 mIoU dice r2_score val/r2"
SMALLER = "val/loss val/mse rmse mae perplexity wer fid val/dice_loss acc_error unknown"


def test_names_say_which_is_better():
    """All that are not known shrink."""
    assert {direction_of(name) for name in LARGER.split(" ")} == {"max"}
    assert {direction_of(name) for name in SMALLER.split(" ")} == {"min"}


def test_values_of_the_environment_are_shown_by_their_names(monkeypatch):
    """Also in the middle of a text and by way of other keys."""
    monkeypatch.setenv("SECRET", "7")
    secret = "${oc.env:SECRET}"
    content = {"a": {"b": secret}, "c": ["x-${a.b}", 3], "d": "${c}", "f": "${oc.decode:${oc.env:SECRET}}"}
    assert shown(OmegaConf.create(content)) == content


def test_groups_that_no_class_reads_are_known():
    """By way of each other, too."""
    groups = {"optimizer": {"lr": 1}, "lr_scheduler": {"max_lr": "${optimizer.lr}"}}
    assert unread_groups(OmegaConf.create({**groups, "model": {"x": 1}})) == {"optimizer", "lr_scheduler"}
    assert unread_groups(OmegaConf.create({**groups, "model": {"x": "${lr_scheduler}"}})) == set()
    assert unread_groups(OmegaConf.create({**groups, "model": {"x": "${oc.select:optimizer}"}})) == {"lr_scheduler"}
