"""Weights as a plain state dict, and the lines of code that load them without a Trainer, for ``task=export``."""

from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ga.app.checkpoints import AtomicCheckpointIO
from lightning_ga.app.run_files import LOADING, WEIGHTS, write_text
from lightning_ga.models.timm import TimmClassifier, timm_arguments


def save_weights(folder: Path, model: LightningModule, checkpoint: Mapping[str, Any]) -> str:
    """Write ``weights.pt`` and the lines that load it, which are returned; a timm network comes without its module.

    Three dots stand for arguments that checkpoints do not keep. With GroupNorm a network is no longer timm's.
    """
    weights, given = checkpoint["state_dict"], checkpoint.get("hyper_parameters", {})
    kind, parameters = type(model), signature(type(model)).parameters
    if kind is TimmClassifier and not given.get("group_norm"):
        weights = {name.removeprefix("net."): one for name, one in weights.items() if name.startswith("net.")}
        basic = {"num_classes": given["num_classes"], "in_chans": given["in_channels"], **(given["options"] or {})}
        arguments = timm_arguments(given["name"], given["image_size"], basic)
        first, function = "import timm\nimport torch", f"timm.create_model({given['name']!r}, "
    else:
        variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in variable}
        arguments = {name: given.get(name, ...) for name in parameters if name in given or name in needed}
        first, function = f"import torch\nfrom {kind.__module__} import {kind.__name__}", f"{kind.__name__}("
    words = [f"{name}={'...' if value is ... else repr(value)}" for name, value in arguments.items()]
    load = f"model.load_state_dict(torch.load({WEIGHTS!r}, weights_only=True))"
    code = f"{first}\nmodel = {function}{', '.join(words)})\n{load}\n"
    AtomicCheckpointIO().save_checkpoint(weights, folder / WEIGHTS)
    write_text(folder / LOADING, code)
    return code
