import pytest
from hydra.utils import get_class, get_object

from lightning_ga import UserError
from lightning_ga.app.build import KINDS, NAMED, check_allowed, check_targets


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
        "lightning_ga.train.main",
        "timm.models.load_state_dict",  # unpickles
        "timm.models.load_checkpoint",
        "timm.create_model",  # takes checkpoint_path
        "timm.models.resnet18",
        "timm.models.create_model",
        "timm.optim.create_optimizer_v2",
        "timm.optim._optim_factory._import_class",  # imports any module
        "timm.data.ImageDataset",
        "timm.data.create_dataset",
        "torch.nn.attention._fa3._fa3_import_module",
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.modules.container.Module.__init__",
        "lightning.pytorch.trainer.call._call_and_handle_interrupt",
        "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        "lightning.pytorch.callbacks.ModelCheckpoint.to_yaml",
        "lightning.pytorch.plugins.environments.slurm_environment.os.system",
        "torchmetrics.utilities.data.allclose",
        "torchmetrics.image.FrechetInceptionDistance",  # loads a network
        "torchvision.models.get_weight",
        "torchvision.models._api.Weights",
        "torchvision.transforms.functional.to_tensor",
        "torchvision.transforms.v2._utils._check_sequence_input",
        "lightning_ga.app.checkpoints.read_safely",
        "lightning_ga.data.image_folder.open",
        None,
        3,
    ],
)
def test_what_is_off_the_list_is_refused(target):
    with pytest.raises(UserError, match=r"not on the list|does not exist"):
        check_targets({"optimizer": {"_target_": target}})


@pytest.mark.parametrize(
    "target",
    [
        *NAMED,
        *("torch.optim.AdamW", "torch.optim.lr_scheduler.OneCycleLR", "torch.nn.GELU", "torch.nn.Sequential"),
        *("torchvision.models.resnet18", "torchvision.models.ResNet", "torchvision.transforms.v2.RandomErasing"),
        *("torchvision.transforms.Normalize", "timm.data.mixup.Mixup", "timm.loss.LabelSmoothingCrossEntropy"),
        *("timm.models.VisionTransformer", "timm.optim.Lion", "timm.scheduler.CosineLRScheduler"),
        *("torchmetrics.Accuracy", "torchmetrics.classification.MulticlassF1Score"),
        *("lightning.pytorch.Trainer", "lightning.pytorch.callbacks.EarlyStopping"),
        *("lightning.pytorch.loggers.CSVLogger", "lightning.pytorch.strategies.DDPStrategy"),
        *("lightning.pytorch.plugins.environments.SLURMEnvironment", "lightning.pytorch.plugins.MixedPrecision"),
        *("lightning.pytorch.plugins.io.AsyncCheckpointIO", "lightning.pytorch.profilers.SimpleProfiler"),
        *("lightning_ga.AutoAccumulate", "lightning_ga.AtomicCheckpointIO", "lightning_ga.data.QuarterTurn"),
        *(
            "lightning_ga.data.Digits",
            "lightning_ga.models.TimmClassifier",
            "lightning_ga.app.progress.RichTrainingBar",
        ),
    ],
)
def test_what_people_build_is_on_the_list(target):
    check_targets({"_target_": target})
    assert callable(get_object(target))


@pytest.mark.parametrize("kind", sorted({kind for kinds in KINDS.values() for kind in kinds}))
def test_every_kind_is_a_class(kind):
    assert isinstance(get_class(kind), type)


def test_a_target_is_found_however_deep():
    config = {"data": {"augment": [{"_target_": "torch.nn.Identity", "x": {"_target_": "os.system"}}]}}
    with pytest.raises(UserError, match=r"data\.augment\[0\]\.x\._target_=os\.system"):
        check_targets(config)


def test_no_interpolation_is_left_to_change_between_the_check_and_the_build():
    with pytest.raises(UserError, match="left after resolving"):
        check_targets({"model": {"name": "${oc.env:PL_GLOBAL_SEED,torch.nn.Identity}"}})


def test_a_user_extends_the_list():
    """By a package, or by a single name."""
    config = {"_target_": "fractions.Fraction"}
    with pytest.raises(UserError):
        check_targets(config)
    check_targets(config, ["fractions"])
    check_targets(config, ["fractions.Fraction"])
    with pytest.raises(UserError):
        check_targets(config, ["fraction"])


def test_a_file_cannot_extend_the_list():
    check_allowed(["mine"], ["mine", "yours"])
    with pytest.raises(UserError, match="stands in a configuration file"):
        check_allowed(["os"], [])


def test_a_name_that_does_not_exist():
    with pytest.raises(UserError, match=r"torch\.optim\.Adamm does not exist"):
        check_targets({"_target_": "torch.optim.Adamm"})
