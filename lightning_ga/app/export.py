"""Weights as a plain state dict, and the lines of code that load them without a Trainer, for ``task=export``."""

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ga.app.checkpoints import AtomicCheckpointIO
from lightning_ga.app.run_files import LOADING, WEIGHTS, write_text
from lightning_ga.models.timm import TimmClassifier, timm_arguments


def save_weights(folder: Path, model: LightningModule, checkpoint: Mapping[str, Any]) -> str:
    """Write ``weights.pt`` and the lines that load it, which are returned; a timm network comes without its module."""
    weights, hyperparameters = checkpoint["state_dict"], checkpoint.get("hyper_parameters", {})
    if type(model) is TimmClassifier:
        weights = {name.removeprefix("net."): one for name, one in weights.items() if name.startswith("net.")}
        code = timm_code(**hyperparameters)
    else:
        code = module_code(type(model), hyperparameters)
    code += f"model.load_state_dict(torch.load({WEIGHTS!r}, weights_only=True))\n"
    AtomicCheckpointIO().save_checkpoint(weights, folder / WEIGHTS)
    write_text(folder / LOADING, code)
    return code


def timm_code(*, name: str, group_norm: bool = False, **hyperparameters: Any) -> str:
    """The lines that make a network by its timm name, from the hyperparameters of a ``TimmClassifier``."""
    arguments = {"num_classes": hyperparameters["num_classes"], "in_chans": hyperparameters["in_channels"]}
    arguments |= hyperparameters["options"] or {}
    made = call("timm.create_model", timm_arguments(name, hyperparameters["image_size"], arguments), name)
    if not group_norm:
        return f"import timm\nimport torch\nmodel = {made}\n"
    imports = "import timm\nimport torch\nfrom lightning_ga.models import to_group_norm\n"
    return f"{imports}model = to_group_norm({made})\n"


def module_code(kind: type[LightningModule], hyperparameters: Mapping[str, Any]) -> str:
    """The lines that make a LightningModule; ``...`` stands for what checkpoints do not keep."""
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in hyperparameters:
            arguments[name] = hyperparameters[name]
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            arguments[name] = ...
    return f"import torch\nfrom {kind.__module__} import {kind.__name__}\nmodel = {call(kind.__name__, arguments)}\n"


def call(function: str, arguments: Mapping[str, Any], *first: Any) -> str:
    """A call as code; ``...`` in place of values that code cannot spell."""
    words = [repr(value) for value in first]
    for name, value in arguments.items():
        text = repr(value)
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):
            text = "..."
        words.append(f"{name}={text}")
    return f"{function}({', '.join(words)})"
