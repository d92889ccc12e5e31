"""Which checkpoint ``ckpt_path=last|best|PATH`` means, and whether it is safe to load.

``last`` and ``best`` belong to the latest run of the same model on the same classes: each run
saves its resolved configuration beside its ``checkpoints`` folder, and that is what is compared.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lightning_ga.compat.atomic import PART
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
    require_whole(path, roots)
    require_safe(path)
    return path


def latest(kind: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Path:
    """``checkpoints/<kind>.ckpt`` of the latest run of the same model."""
    path = next(of_model(f"{kind}.ckpt", model, roots), None)
    if path is not None:
        return path
    folders = " or ".join(f"{str(root)!r}" for root in roots)
    torn = next(of_model(f"{kind}.ckpt{PART}", model, roots), None)
    begun = f" ({str(torn)!r} was being written when its run was killed, and is not whole)" if torn else ""
    raise UserError(f"ckpt_path={kind}: no run of this model below {folders} has left one{begun}; train it first.")


def of_model(name: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Iterator[Path]:
    """Files of a name or pattern that runs of the same model have left, the latest first."""
    files = [path for root in roots for path in root.glob(f"**/checkpoints/{name}")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if architecture(saved_model(path)) == architecture(model):
            yield path


def saved_model(checkpoint: Path) -> Mapping[str, Any]:
    """The ``model`` section of the run that wrote a checkpoint; empty if its configuration is gone."""
    config = checkpoint.parent.parent / "config.yaml"
    section = OmegaConf.to_container(OmegaConf.load(config)).get("model") if config.is_file() else None  # type: ignore[union-attr]
    return section or {}


def architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a ``model`` section that the weights depend on."""
    return {key: value for key, value in model.items() if key not in (*BUILT_ELSEWHERE, "pretrained")}


def require_whole(path: Path, roots: Sequence[Path] = ()) -> None:
    """Refuse a checkpoint whose writing was cut off; another is named, and none is taken in its place.

    Raises:
        UserError: If its end is missing.
    """
    if not begins_as_archive(path) or zipfile.is_zipfile(path):
        return
    others = (other for other in of_model("*.ckpt", saved_model(path), roots) if other != path)
    whole = next((other for other in others if zipfile.is_zipfile(other)), None)
    hint = "give the path of another one" if whole is None else f"give the path of another one, such as {str(whole)!r}"
    raise UserError(
        f"{str(path)!r} is a torn checkpoint: its end is missing, as when writing or copying it was cut off. "
        f"Nothing was loaded in its place: {hint}."
    )


def begins_as_archive(path: Path) -> bool:
    """Whether a file begins as those of ``torch.save`` do."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


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
