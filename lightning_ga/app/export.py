"""Weights as a plain state dict, and the lines of code that load them without a Trainer, for ``task=export``."""

from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ga.app.run_files import LOADING, WEIGHTS, write_text
from lightning_ga.checkpoints import AtomicCheckpointIO


def save_weights(folder: Path, model: LightningModule, checkpoint: Mapping[str, Any]) -> str:
    """Write ``weights.pt`` and the lines that load it, which are returned; a timm network comes without its module.

    A module says by its attribute ``timm_call`` how ``timm.create_model`` makes its ``net``. Three dots stand for
    arguments that checkpoints do not keep.
    """
    weights, given = checkpoint["state_dict"], checkpoint.get("hyper_parameters", {})
    kind, parameters = type(model), signature(type(model)).parameters
    timm_call = getattr(model, "timm_call", None)
    if timm_call:
        weights = {name.removeprefix("net."): one for name, one in weights.items() if name.startswith("net.")}
        arguments, first, function = timm_call, "import timm\nimport torch", "timm.create_model("
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
