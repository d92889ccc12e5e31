"""Any model of the timm library as a classifier."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import timm
from huggingface_hub import constants, get_session
from torch import nn

from lightning_ga.errors import UserError
from lightning_ga.models.classifier import Classifier, to_group_norm

OPENS_FILES = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"}


class TimmClassifier(Classifier):
    """A timm model by its name.

    Args:
        name: A name of ``timm.list_models()``, with or without the tag of its weights.
        pretrained: Start from published weights (fetched from the network, or from its local cache).
        num_classes: Number of classes.
        in_channels: Channels of an image.
        image_size: Height and width of an image, in pixels; models of fixed input size are built for it.
        options: Further arguments of ``timm.create_model``, such as ``drop_rate``.
        group_norm: Replace BatchNorm by GroupNorm, for which accumulation is exact; see :func:`to_group_norm`.
        **training: ``optimizer``, ``lr_scheduler`` and ``label_smoothing`` of :class:`Classifier`.
    """

    def __init__(
        self,
        name: str = "resnet34d",
        *,
        pretrained: bool = False,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        options: Mapping[str, Any] | None = None,
        group_norm: bool = False,
        **training: Any,
    ) -> None:
        options = dict(options or {})
        arguments = {"num_classes": num_classes, "in_chans": in_channels, **options}
        net = build_timm(name, image_size=image_size, pretrained=pretrained, **arguments)
        net = to_group_norm(net) if group_norm else net
        super().__init__(net, num_classes, **training)
        pretrained = False  # A checkpoint brings its own weights: loading one must not fetch others.
        self.save_hyperparameters(
            "name", "pretrained", "num_classes", "in_channels", "image_size", "options", "group_norm"
        )


def build_timm(name: str, *, image_size: int = 224, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Call ``timm.create_model`` without opening files, and raise errors that say what to do.

    Args:
        name: A name of ``timm.list_models()``.
        image_size: Height and width of an image, for models of fixed input size.
        pretrained: Start from published weights.
        **arguments: Further arguments of ``timm.create_model``.

    Raises:
        UserError: For an unknown name (with the nearest ones), or weights that cannot be fetched.
    """
    require_timm_name(name)
    for option in OPENS_FILES & arguments.keys():
        raise UserError(f"{option}=… makes timm open a file that may be a pickle: use model.init_from=PATH instead.")
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is not None and config.fixed_input_size:
        arguments.setdefault("img_size", image_size)
    if not pretrained:
        return timm.create_model(name, **arguments)
    unreached, offline = hub_error(), constants.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = unreached is not None  # only its cache is looked into
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # the hub raises errors of several HTTP libraries
        reason = str(unreached or error).strip().split("\n")[0] or type(unreached or error).__name__
        raise UserError(
            f"The weights for model.pretrained=true of {name!r} could not be fetched ({reason}): check the network, "
            "set HF_HUB_OFFLINE=1 where the cache has them, give a file of weights by model.init_from=PATH, or train "
            "from scratch with model.pretrained=false."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def hub_error() -> Exception | None:
    """Why the hub cannot be reached, if so: the hub itself tries for a minute before it looks into its cache."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:
        return error
    return None


def require_timm_name(name: str) -> None:
    """Refuse a name that timm does not know, and show the nearest ones.

    Examples:
        >>> require_timm_name("resnet34d")
        >>> require_timm_name("resnet34dd")
        Traceback (most recent call last):
        ...
        lightning_ga.errors.UserError: timm has no model 'resnet34dd'; the nearest names: ...
    """
    base, _, tag = name.partition(".")
    if timm.is_model(base) and (not tag or name in timm.list_pretrained(f"{base}.*")):
        return
    known = timm.list_pretrained(f"{base}.*") if timm.is_model(base) else timm.list_models()
    nearest = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"the nearest names: {', '.join(nearest)}" if nearest else "see timm.list_models()"
    raise UserError(f"timm has no model {name!r}; {hint}.")
