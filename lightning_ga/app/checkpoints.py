"""Write checkpoints that are complete or absent, and say which one ``ckpt_path=last|best|FOLDER|PATH`` means.

Lightning flushes nothing, and moves a file from the folder of temporary files, which may lie on another disk.
"""

import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins import TorchCheckpointIO as LegacyTorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ga.app.run_files import CONFIG
from lightning_ga.errors import UserError

PART = ".part"  # suffix of a file that is being written; a search for the last checkpoint ignores it
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class AtomicCheckpointIO(TorchCheckpointIO, LegacyTorchCheckpointIO):
    """Writes checkpoints that are never torn: to ``NAME.ckpt.part``, which is flushed and then renamed.

    Remote paths are left to Lightning. Hyperparameters that ``weights_only=True`` refuses are left out, and named once;
    partials and classes, such as an optimizer of a configuration, without a word: nothing that was trained is in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, which replaces a file there once it is complete; Lightning writes with options."""
        checkpoint = self._loadable(checkpoint)
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(local)
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(place.name + PART)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _loadable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        given = {name: dict(checkpoint[name]) for name in HYPERPARAMETERS if name in checkpoint}
        kept = {name: {key: one for key, one in values.items() if loads(one)} for name, values in given.items()}
        left_out = {
            str(key): value
            for name, values in given.items()
            for key, value in values.items()
            if key not in kept[name] and key not in self._left_out and not isinstance(value, partial | type)
        }
        if left_out:
            self._left_out |= left_out.keys()
            names = sorted(left_out)
            rank_zero_warn(
                f"Checkpoints leave out the hyperparameters {', '.join(names)}, as they would not load with "
                "weights_only=True. A run of the same configuration makes them again; your own code gives them to "
                f"load_from_checkpoint(PATH, {', '.join(f'{name}=…' for name in names)})."
            )
        return {**checkpoint, **kept}


def loads(value: Any) -> bool:
    """Whether a value that is saved loads with ``weights_only=True``: plain ones do, others are tried."""
    if type(value) in (dict, list, tuple):
        return all(map(loads, [*value, *value.values()] if isinstance(value, dict) else value))
    if value is None or type(value) in (bool, int, float, str):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # picklers and what they call raise anything
        return False
    return True


def find_checkpoint(
    wanted: str, weights: Mapping[str, Tensor], roots: Sequence[Path], *, kind: str = "last", own: Path = Path()
) -> Path:
    """The file that ``ckpt_path`` means; ``last`` is that of ``own``, else the latest that fits the weights."""
    if wanted in ("last", "best"):
        mine = folders_of(own)
        folders = mine or {path.parent for root in roots for path in root.glob("**/checkpoints/*.ckpt")}
        files = [path for folder in folders if (path := in_folder(folder, wanted)).is_file()]
        latest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
        remedy = f"no run of this model below {' or '.join(repr(str(root)) for root in roots)} has left one; train it."
        found = next((path for path in latest if mine or fits(path, weights)), None)
    else:
        path = Path(wanted).expanduser()
        places = [in_folder(one, name) for name in (kind, "last", "best") for one in (*folders_of(path), path)]
        remedy = "neither a file nor a folder with checkpoints/last.ckpt or best.ckpt: give one of these, last or best."
        found = next((file for file in (path, *places) if file.is_file()), None)
    if found is None:
        raise UserError(f"ckpt_path={wanted}: {remedy}")
    return found


def folders_of(run: Path) -> list[Path]:
    """Where a run has left checkpoints: Lightning puts them beside the logs if a callback names no folder."""
    beside = run.glob("*/checkpoints") if (run / CONFIG).is_file() else ()
    return [folder for folder in (run / "checkpoints", *beside) if any(folder.glob("*.ckpt"))]


def in_folder(folder: Path, name: str) -> Path:
    """``NAME.ckpt``; the best one may have another name, which the last one tells."""
    path = folder / f"{name}.ckpt"
    with suppress(UserError, LookupError, AttributeError):
        if name == "best" and not path.is_file():
            callbacks = read_safely(folder / "last.ckpt")["callbacks"]
            found = {one["monitor"]: one["best_model_path"] for one in callbacks.values() if one.get("best_model_path")}
            wanted = callbacks.get("OptimizedMetric", {}).get("name")
            path = folder / Path(found.get(wanted) or next((found[one] for one in found if one), path)).name
    return path


def fits(path: Path, weights: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint can be read and contains weights of these names and shapes."""
    try:
        saved = read_safely(path)["state_dict"]
        return {name: one.shape for name, one in saved.items()} == {name: one.shape for name, one in weights.items()}
    except (UserError, LookupError, TypeError, AttributeError):
        return False


def read_safely(path: Path) -> Any:
    """The content of a file of ``torch.save``, if that is tensors and plain values only: nothing is built from it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # on bytes that are no pickle the unpickler fails in any way
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it contains {unsafe[1]}, which loading would build" if unsafe else "it is another one, or not whole"
        raise UserError(f"{str(path)!r} is no file of tensors and plain values ({reason}): give another.") from error
