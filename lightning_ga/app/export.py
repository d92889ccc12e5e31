"""Weights as a plain state dict, and the lines of code that load them without a Trainer, for ``task=export``."""

from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ga.app.run_files import LOADING, WEIGHTS, write_text
from lightning_ga.checkpoints import AtomicCheckpointIO

VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def save_weights(folder: Path, model: LightningModule, checkpoint: Mapping[str, Any]) -> str:
    """Write ``weights.pt`` and the lines that load it, which are returned; a timm network comes without its module.

    A module says by its attribute ``timm_call`` how ``timm.create_model`` makes its ``net``. Three dots stand for
    arguments that checkpoints do not keep.
    """
    weights = checkpoint["state_dict"]
    timm_call = getattr(model, "timm_call", None)
    name = type(model).__name__
    if timm_call:
        weights = {key.removeprefix("net."): weight for key, weight in weights.items() if key.startswith("net.")}
        arguments = [f"{key}={value!r}" for key, value in timm_call.items()]
        code = f"import timm\nimport torch\nmodel = timm.create_model({', '.join(arguments)})\n"
    else:
        arguments = arguments_of(type(model), checkpoint.get("hyper_parameters", {}))
        code = f"import torch\nfrom {type(model).__module__} import {name}\nmodel = {name}({', '.join(arguments)})\n"
    code += f"model.load_state_dict(torch.load({WEIGHTS!r}, weights_only=True))\n"
    AtomicCheckpointIO().save_checkpoint(weights, folder / WEIGHTS)
    write_text(folder / LOADING, code)
    return code


def arguments_of(kind: type, given: Mapping[str, Any]) -> list[str]:
    """The arguments of a class as they are written in Python, of which some are given."""
    words = []
    for name, parameter in signature(kind).parameters.items():
        if name in given:
            words.append(f"{name}={given[name]!r}")
        elif parameter.default is Parameter.empty and parameter.kind not in VARIABLE:
            words.append(f"{name}=...")
    return words
