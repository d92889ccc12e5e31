"""Start a model from bare weights: ``model.init_from=weights.pt``."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_ga.app.checkpoints import read_safely
from lightning_ga.errors import UserError

WRAPPERS = re.compile(r"((module|model|net|_orig_mod)\.)*")  # what they put before the names of weights


def load_initial_weights(model: nn.Module, name: str) -> str:
    """Load the weights of a file (of ``torch.save`` or safetensors) that fit a model, or its ``net`` where it has one.

    Return what was loaded, in one sentence. A classifier's last layer for other classes is left as it was drawn.
    """
    path = Path(name)
    if not path.is_file():
        raise UserError(f"model.init_from={name} is not a file: give the path of weights, such as weights.pt.")
    net: nn.Module = getattr(model, "net", model)
    wanted, found = net.state_dict(), read_weights(path)
    named = (found, {WRAPPERS.sub("", key, count=1): value for key, value in found.items()})
    fitting = max((matching(weights, wanted) for weights in named), key=len)
    if not fitting:
        raise UserError(
            f"model.init_from={name}: none of its {len(found)} weights (such as {next(iter(found), 'none')}) is one of "
            f"this model (such as {next(iter(wanted))}): choose the model that they belong to."
        )
    net.load_state_dict(fitting, strict=False)
    left = sorted(wanted.keys() - fitting.keys())
    rest = (
        f"; {len(left)} keep their first values: {', '.join(left[:4])}{', …' if len(left) > 4 else ''}" if left else ""
    )
    return f"Weights: {len(fitting)} of {len(wanted)} from {path}{rest}"


def matching(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those weights whose name and shape are wanted."""
    return {key: value for key, value in weights.items() if key in wanted and wanted[key].shape == value.shape}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file by their names."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    content: Any = read_safely(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    pairs = content.items() if isinstance(content, Mapping) else ()
    return {str(key): value for key, value in pairs if isinstance(value, Tensor)}
