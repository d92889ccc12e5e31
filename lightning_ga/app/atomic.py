"""Write checkpoints that are complete or absent: beside the file, flushed to the disk, then renamed.

Lightning writes to the folder of temporary files and moves the result (``fabric/utilities/cloud_io.py``,
``_atomic_save``). Where that folder lies on another disk, moving is copying, and a process that is killed meanwhile
leaves a torn file in place of the checkpoint before it. Even on one disk nothing is flushed: after a loss of power the
new name may stand for old or missing bytes.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins import TorchCheckpointIO as LegacyTorchCheckpointIO

PART = ".part"  # suffix of a file that is being written; a search for the last checkpoint ignores it


class AtomicCheckpointIO(TorchCheckpointIO, LegacyTorchCheckpointIO):
    """Writes checkpoints that are never torn, in the format that Lightning loads with or without it.

    The file under a checkpoint's name is always complete: the previous one, until the next is written. A process killed
    meanwhile leaves ``NAME.ckpt.part``, which the next write replaces. Remote paths (``s3://…``) are left to Lightning.
    The checkpoint is not copied in memory first, which Lightning does twice.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False, barebones=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, which replaces a file there once it is complete; Lightning writes with options."""
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
        flush_folder(place.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a loss of power; do nothing where the file system cannot."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
