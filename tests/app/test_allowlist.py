import pytest

from lightning_ga import UserError
from lightning_ga.app.allowlist import check_hydra_section, check_targets


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.load",
        "torch.hub.load",
        "numpy.load",
        "pathlib.Path.write_text",
        "lightning.pytorch.trainer.trainer.os.getcwd",  # begins well, ends elsewhere
        "torch.nn.modules.module.torch.load",
        "torch.optim",  # a module
        "lightning_ga.models.MLPClassifier.load_from_checkpoint",  # a method
        "lightning_ga.train.main.__globals__",
        None,
    ],
)
def test_what_is_off_the_list_is_refused(target):
    """However it is written, and before it is called."""
    with pytest.raises(UserError, match=r"not on the list|does not exist"):
        check_targets({"optimizer": {"_target_": target}})


def test_a_target_is_found_however_deep():
    """In lists, in arguments, in arguments of arguments; the message says where."""
    config = {"data": {"augment": [{"_target_": "torch.nn.Identity", "x": {"_target_": "os.system"}}]}}
    with pytest.raises(UserError, match=r"data\.augment\[0\]\.x\._target_=os\.system"):
        check_targets(config)


def test_private_modules_of_a_trusted_package_are_fine():
    """timm and torch define their public names in such modules."""
    check_targets([{"_target_": "timm.create_model"}, {"_target_": "torch.optim.AdamW"}, {"_target_": "torch.nn.GELU"}])


def test_a_user_extends_the_list():
    """By a package, or by a single name."""
    config = {"_target_": "fractions.Fraction"}
    with pytest.raises(UserError):
        check_targets(config)
    check_targets(config, ["fractions"])
    check_targets(config, ["fractions.Fraction"])
    with pytest.raises(UserError):
        check_targets(config, ["fraction"])


def test_a_name_that_does_not_exist():
    """A misspelt class of a trusted package is told as such."""
    with pytest.raises(UserError, match=r"torch\.optim\.Adamm does not exist"):
        check_targets({"_target_": "torch.optim.Adamm"})


def test_hydra_builds_nothing_before_the_job():
    """Its callbacks, and logging by anything but the logging module, are refused."""
    plain = {
        "callbacks": {},
        "hydra_logging": {},
        "job_logging": {"handlers": {"a": {"class": "logging.StreamHandler"}}},
    }
    check_hydra_section(plain)
    with pytest.raises(UserError, match=r"hydra\.callbacks"):
        check_hydra_section(plain | {"callbacks": {"x": {"_target_": "os.getcwd"}}})
    for factory in ({"()": "os.system"}, {"class": "subprocess.Popen"}):
        with pytest.raises(UserError, match=r"hydra\.job_logging"):
            check_hydra_section(plain | {"job_logging": {"handlers": {"a": factory}}})
