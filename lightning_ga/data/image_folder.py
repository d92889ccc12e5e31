"""Your own pictures, one folder per class.

``root/train/<class>/*.png`` is needed. Where ``root/val`` or ``root/test`` are missing, a share of
the training pictures is held out for them, in the same mix of classes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_ga.data.images import ImageData, Labelled, Splits
from lightning_ga.data.pictures import class_folders, pictures_in, refuse_unreadable, unreadable
from lightning_ga.errors import UserError


class ImageFolder(ImageData):
    """Folders of pictures in any format that Pillow opens.

    Args:
        test_fraction: Share of the training pictures that is kept for the test where ``root/test`` is missing.
        check_pictures: Decode every file once before training; those that cannot be read are listed.
        skip_broken: Leave out files that cannot be read, and say how many.
        **arguments: See :class:`ImageData`.
    """

    name = "image_folder"

    def __init__(
        self, *, test_fraction: float = 0.1, check_pictures: bool = True, skip_broken: bool = False, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.test_fraction = test_fraction
        self.check_pictures, self.skip_broken = check_pictures, skip_broken
        self.class_names = self._classes()
        if self.num_classes is None:
            self.num_classes = len(self.class_names)

    def read(self) -> Splits:
        """List the files of the three folders."""
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
        unknown = [name for name in class_folders(folder)[0] if name not in self.class_names]
        if unknown:
            raise UserError(
                f"{str(folder)!r} has classes that are not in train/: {', '.join(unknown)}. Add them there, or remove "
                "them: no model can have learned them."
            )
        pictures = [(path, label) for label, name in enumerate(self.class_names) for path in pictures_in(folder / name)]
        if self.check_pictures or self.skip_broken:
            pictures = self._readable(pictures)
        if not pictures:
            raise UserError(f"{str(folder)!r} holds no pictures: it needs one folder of image files per class.")
        paths, labels = zip(*pictures)
        return Labelled(paths, torch.tensor(labels))

    def _readable(self, pictures: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        broken = unreadable([path for path, _ in pictures])
        if broken and not self.skip_broken:
            raise refuse_unreadable(broken)
        if broken:
            print(
                f"Warning: {len(broken):,} of {len(pictures):,} pictures cannot be read and are left out, such as "
                f"{next(iter(broken))}.",
                file=sys.stderr,
            )
        return [(path, label) for path, label in pictures if path not in broken]

    def _classes(self) -> list[str]:
        train = Path(self.root) / "train"
        names, left_out = class_folders(train)
        if not names:
            raise UserError(
                f"{str(train)!r} needs one folder of pictures per class: set data.root=FOLDER so that "
                "FOLDER/train/<class>/*.png are your pictures."
            )
        empty = [name for name in names if not pictures_in(train / name)]
        if empty:
            raise UserError(
                f"{str(train)!r} has classes without a picture: {', '.join(empty)}. Remove these folders, or "
                "put pictures into them."
            )
        if left_out:
            print(f"Warning: no classes, and left out, are {', '.join(left_out)} in {train}.", file=sys.stderr)
        return names
