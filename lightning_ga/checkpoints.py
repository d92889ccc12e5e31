"""Checkpoints that are complete or absent: written atomically, read as data, and the newest of a folder.

Lightning flushes nothing, and moves a file from the folder of temporary files, which may lie on another disk.
"""

import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins import TorchCheckpointIO as LegacyTorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from lightning_ga.errors import UserError

PART = ".part"  # suffix of a file that is being written; a search for the last checkpoint ignores it
RECORD = "meta.pt"  # of a sharded checkpoint: Lightning writes it after all shards (strategies/fsdp.py, 2.6.6)
PLAIN = (NoneType, bool, int, float, complex, str, bytes, Tensor, Parameter, torch.dtype, torch.device, torch.Size)
HYPERPARAMETERS = {"hyper_parameters", "datamodule_hyper_parameters"}
TYPES = {"hparams_type", "datamodule_hparams_type"}  # of hyperparameters that are a configuration of OmegaConf


class AtomicCheckpointIO(TorchCheckpointIO, LegacyTorchCheckpointIO):
    """Writes checkpoints that are never torn: to ``NAME.ckpt.part``, which is flushed and then renamed.

    Remote paths are left to Lightning. Hyperparameters are left out, and named once, if they are not made of plain
    values and tensors alone, which ``weights_only=True`` loads; partials and classes, such as an optimizer of a
    configuration, without a word: nothing that was trained is in them. A configuration of OmegaConf is loaded as a
    dictionary with attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out: set[tuple[str, str]] = set()  # groups and names

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, which replaces a file there once it is complete; Lightning writes with options."""
        checkpoint = self._loadable(checkpoint)
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(Path(local), partial(torch.save, checkpoint))

    def _loadable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint without the hyperparameters that would not load, and name them once."""
        loadable = checkpoint.copy()
        left_out = set[tuple[str, str]]()
        for group in HYPERPARAMETERS & checkpoint.keys():
            loadable[group] = {}
            for name, value in dict(checkpoint[group]).items():
                if loads(value):
                    loadable[group][name] = value
                elif not isinstance(value, partial | type):
                    left_out.add((group, str(name)))
        for kind in TYPES & checkpoint.keys():
            loadable[kind] = "AttributeDict"  # what Lightning makes of any text (core/saving.py, 2.6.6)
        left_out -= self._left_out
        if left_out:
            self._left_out |= left_out
            names = sorted({name for _, name in left_out})
            rank_zero_warn(
                f"Checkpoints leave out the hyperparameters {', '.join(names)}, as they would not load with "
                "weights_only=True. A run of the same configuration makes them again; your own code gives them to "
                f"load_from_checkpoint(PATH, {', '.join(f'{name}=…' for name in names)})."
            )
        return loadable


def write_whole(place: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` write a file, which is flushed and then gets its name, or is removed after an error."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + PART)
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def loads(value: Any) -> bool:
    """Return whether a value is of tensors and plain values alone, which load with ``weights_only=True``."""
    if type(value) in (dict, OrderedDict):
        return all(map(loads, (*value, *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(loads, value))
    return type(value) in PLAIN


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the most optimizer steps in a folder or below it; ``None`` if none was ever written.

    It is a file, or the folder of a sharded strategy. What a killed process has half written does not count, nor do
    checkpoints of weights alone.

    Raises:
        UserError: If there are checkpoints, and none of them is whole.
    """
    paths = sorted(Path(folder).expanduser().rglob("*.ckpt"))
    ages: dict[Path, tuple[int, int]] = {}  # in optimizer steps, then by the clock
    for path in paths:
        steps = resumable_steps(path)
        if steps is not None:
            ages[path] = (steps, path.stat().st_mtime_ns)
    if paths and not ages:
        names = ", ".join(map(attrgetter("name"), paths[:3]))
        raise UserError(
            f"No checkpoint in {str(folder)!r} ({names}) is the whole state of a training: resume from another one, or "
            "start in another folder."
        )
    return max(ages, key=ages.__getitem__, default=None)


def resumable_steps(path: Path) -> int | None:
    """Return the optimizer steps of a whole checkpoint of a training; ``None`` for any other file or folder.

    They are ``0`` if reading them would run code: such a checkpoint is whole, and counts as the oldest. A folder of
    shards is whole if nothing in it is newer than its record.
    """
    record = path
    needed = {"loops", "optimizer_states"}  # weights alone have neither
    if path.is_dir():
        record = path / RECORD
        needed = {"loops", "lr_schedulers"}  # the shards hold the optimizers' states
        if not record.is_file() or any(file.stat().st_mtime_ns > record.stat().st_mtime_ns for file in path.iterdir()):
            return None
    try:
        content = read_safely(record)
        return int(content["global_step"]) if needed <= content.keys() else None
    except UserError:
        return 0 if is_whole_archive(record) else None
    except (LookupError, TypeError):  # a file of other things than a training's state
        return None


def is_whole_archive(path: Path) -> bool:
    """Return whether a file is an archive, as ``torch.save`` writes one, with all of its bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):  # cut off, or no archive
        return False


def read_safely(path: Path) -> Any:
    """Return the content of a file of ``torch.save``, if that is tensors and plain values only: nothing is built."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # on bytes that are no pickle the unpickler fails in any way
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it contains {unsafe[1]}, which loading would build" if unsafe else "it is another one, or not whole"
        raise UserError(f"{str(path)!r} is no file of tensors and plain values ({reason}): give another.") from error
