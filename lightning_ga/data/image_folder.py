"""Your own pictures, one folder per class.

``root/train/<class>/*.png`` is needed. Where ``root/val`` or ``root/test`` are missing, a share of
the training pictures is held out for them, in the same mix of classes.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lightning_ga.data.images import ImageData, Labelled, Splits
from lightning_ga.errors import UserError


class ImageFolder(ImageData):
    """Folders of pictures in any format that Pillow opens.

    Args:
        test_fraction: Share of the training pictures that is kept for the test where ``root/test`` is missing.
        **arguments: See :class:`ImageData`.
    """

    name = "image_folder"

    def __init__(self, *, test_fraction: float = 0.1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.test_fraction = test_fraction
        if self.num_classes is None:
            self.num_classes = len(self._classes())

    def read(self) -> Splits:
        """List the files of the three folders."""
        self.class_names = self._classes()
        train = self._part("train")
        assert train is not None  # _classes() has seen the folder
        test = self._part("test")
        if test is None:
            train, test = self.hold_out(train, self.test_fraction)
        val = self._part("val")
        if val is None:
            train, val = self.hold_out(train, self.val_fraction)
        return Splits(train, val, test)

    def _part(self, part: str) -> Labelled | None:
        folder = Path(self.root) / part
        if not folder.is_dir():
            return None
        pictures = [
            (str(path), label) for label, name in enumerate(self.class_names) for path in pictures_in(folder / name)
        ]
        if not pictures:
            raise UserError(f"{str(folder)!r} holds no pictures: it needs one folder of image files per class.")
        paths, labels = zip(*pictures)
        return Labelled(paths, torch.tensor(labels))

    def _classes(self) -> list[str]:
        train = Path(self.root) / "train"
        names = sorted(folder.name for folder in train.iterdir() if folder.is_dir()) if train.is_dir() else []
        if not names:
            raise UserError(
                f"{str(train)!r} needs one folder of pictures per class: set data.root=FOLDER so that "
                "FOLDER/train/<class>/*.png are your pictures."
            )
        return names


def pictures_in(folder: Path) -> list[Path]:
    """Every file below a folder that Pillow can open by its ending, in order of name."""
    endings = Image.registered_extensions()
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings)
