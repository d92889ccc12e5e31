"""Any model of the timm library as a classifier."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import timm
from torch import nn

from lightning_ga.errors import UserError
from lightning_ga.models.classifier import Classifier
from lightning_ga.models.group_norm import to_group_norm


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
        if group_norm:
            net = to_group_norm(net)
        super().__init__(net, num_classes, **training)
        # What makes a network for its weights with timm alone; GroupNorm's names are others.
        plain = {"model_name": name, **timm_arguments(name, image_size, arguments)}
        self.timm_call = {} if group_norm else plain
        pretrained = False  # A checkpoint brings its own weights: loading one must not fetch others.
        self.save_hyperparameters(
            "name", "pretrained", "num_classes", "in_channels", "image_size", "options", "group_norm"
        )


def build_timm(name: str, *, image_size: int = 224, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Call ``timm.create_model``, which is given ``image_size`` in pixels if the model has a fixed input size.

    Raises:
        UserError: For an unknown name, with the nearest ones, or for weights that cannot be fetched.
    """
    base, _, tag = name.partition(".")
    known = timm.list_pretrained(f"{base}.*") if timm.is_model(base) else timm.list_models()
    if not timm.is_model(base) or (tag and name not in known):
        nearest = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4))
        raise UserError(f"timm has no model {name!r}; the nearest names: {nearest or 'see timm.list_models()'}.")
    arguments = timm_arguments(name, image_size, arguments)
    if not pretrained:
        return timm.create_model(name, **arguments)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not each of its retries: the error says it all
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except OSError as error:  # every error of huggingface_hub is one
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"The weights for model.pretrained=true of {name!r} could not be fetched ({reason}): check "
            "the network, or use model.pretrained=false, or a copy: +model.options.pretrained_cfg_overlay.file=PATH."
        ) from error


def timm_arguments(name: str, image_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model``, with ``img_size`` if the model has a fixed input size."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or not config.fixed_input_size:
        return dict(arguments)
    return {"img_size": image_size, **arguments}
