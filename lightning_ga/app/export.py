"""Weights as a plain state dict, and the lines of code that load them without a Trainer, for ``task=export``."""

from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ga.app.run_files import LOADING, WEIGHTS, write_text
from lightning_ga.checkpoints import AtomicCheckpointIO

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def save_weights(folder: Path, model: LightningModule, checkpoint: Mapping[str, Any]) -> str:
    """Write ``weights.pt`` and the lines that load it, which are returned; a timm network comes without its module.

    A module says by its attribute ``timm_call`` how ``timm.create_model`` makes its ``net``. ``Ellipsis`` stands
    for arguments that checkpoints do not keep, also for required ones that are no hyperparameters.
    """
    weights = checkpoint["state_dict"]
    timm_call = getattr(model, "timm_call", None)
    name = type(model).__name__
    if timm_call:
        weights = {key.removeprefix("net."): weight for key, weight in weights.items() if key.startswith("net.")}
        arguments = [f"{key}={value!r}" for key, value in timm_call.items()]
        code = f"import timm\nimport torch\nmodel = timm.create_model({', '.join(arguments)})\n"
    else:
        parameters = signature(type(model)).parameters.values()
        required = [each.name for each in parameters if each.default is each.empty and each.kind not in VARIADIC]
        kept = {**dict.fromkeys([*required, *model.hparams], ...), **checkpoint.get("hyper_parameters", {})}
        arguments = [f"{key}={value!r}" for key, value in kept.items()]
        code = f"import torch\nfrom {type(model).__module__} import {name}\nmodel = {name}({', '.join(arguments)})\n"
    code += f"model.load_state_dict(torch.load({WEIGHTS!r}, weights_only=True))\n"
    AtomicCheckpointIO().save_checkpoint(weights, folder / WEIGHTS)
    write_text(folder / LOADING, code)
    return code
