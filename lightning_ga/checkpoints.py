"""Which checkpoint ``ckpt_path=last|best|PATH`` means, and whether it is safe to load.

``last`` and ``best`` belong to the latest run of the same model on the same classes: each run
saves its resolved configuration beside its ``checkpoints`` folder, and that is what is compared.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lightning_ga.errors import UserError

BUILT_ELSEWHERE = ("optimizer", "lr_scheduler")  # they do not decide whether weights fit


def find_checkpoint(wanted: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Path:
    """The file that ``ckpt_path`` means.

    Args:
        wanted: ``last``, ``best`` or a path.
        model: The resolved ``model`` section of this run.
        roots: Folders below which earlier runs are looked for.

    Raises:
        UserError: If there is no such file, or it is not safe to load.
    """
    path = latest(wanted, model, roots) if wanted in ("last", "best") else Path(wanted)
    if not path.is_file():
        raise UserError(f"ckpt_path={wanted} is not a file; give last, best or the path of a .ckpt file.")
    require_safe(path)
    return path


def latest(kind: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Path:
    """``checkpoints/<kind>.ckpt`` of the latest run of the same model."""
    files = [path for root in roots for path in root.glob(f"**/checkpoints/{kind}.ckpt")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if architecture(saved_model(path)) == architecture(model):
            return path
    folders = " or ".join(f"{str(root)!r}" for root in roots)
    raise UserError(f"ckpt_path={kind}: no run of this model below {folders} has left one; train it first.")


def saved_model(checkpoint: Path) -> Mapping[str, Any]:
    """The ``model`` section of the run that wrote a checkpoint; empty if its configuration is gone."""
    config = checkpoint.parent.parent / "config.yaml"
    section = OmegaConf.to_container(OmegaConf.load(config)).get("model") if config.is_file() else None  # type: ignore[union-attr]
    return section or {}


def architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a ``model`` section that the weights depend on."""
    return {key: value for key, value in model.items() if key not in (*BUILT_ELSEWHERE, "pretrained")}


def require_safe(path: Path) -> None:
    """Refuse a file that holds anything but tensors and plain values: nothing is built from it.

    Raises:
        UserError: If it does, or is no checkpoint at all.
    """
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on bytes that are no pickle the unpickler fails in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{str(path)!r} is not a checkpoint of tensors and plain values ({reason}): give ckpt_path=last, "
            "ckpt_path=best or the path of a .ckpt file."
        ) from error
