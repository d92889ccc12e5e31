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
    weights = checkpoint["state_dict"]
    given = checkpoint.get("hyper_parameters", {})
    kind = type(model)
    parameters = signature(type(model)).parameters
    timm_call = getattr(model, "timm_call", None)
    if timm_call:
        weights = {name.removeprefix("net."): one for name, one in weights.items() if name.startswith("net.")}
        arguments = timm_call
        first = "import timm\nimport torch"
        function = "timm.create_model("
    else:
        variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in variable}
        arguments = {name: given.get(name, ...) for name in parameters if name in given or name in needed}
        first = f"import torch\nfrom {kind.__module__} import {kind.__name__}"
        function = f"{kind.__name__}("
    words = []
    for name, value in arguments.items():
        words.append(f"{name}=..." if value is ... else f"{name}={value!r}")
    load = f"model.load_state_dict(torch.load({WEIGHTS!r}, weights_only=True))"
    code = f"{first}\nmodel = {function}{', '.join(words)})\n{load}\n"
    AtomicCheckpointIO().save_checkpoint(weights, folder / WEIGHTS)
    write_text(folder / LOADING, code)
    return code
