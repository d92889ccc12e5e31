"""Your own pictures, one folder per class."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from lightning_ga.data.images import ImageData, Labelled, Splits, read_picture
from lightning_ga.errors import UserError, printable

MOST_LISTED = 5


class ImageFolder(ImageData):
    """Folders of pictures, ``root/train/<class>/*.png``, as torchvision finds them: BMP, JPEG, PNG, PPM, TIFF or WebP.

    If ``root/val`` or ``root/test`` is missing, a share of the training pictures is held out for it.

    Args:
        test_fraction: Share of the training pictures that is kept for the test if ``root/test`` is missing.
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
        self.check_pictures = check_pictures
        self.skip_broken = skip_broken
        try:
            self.class_names, self.class_numbers = find_classes(Path(self.root) / "train")
        except FileNotFoundError as error:
            hint = "set data.root=FOLDER so that FOLDER/train/<class>/*.png are your pictures."
            raise UserError(f"{str(error).rstrip('.')}: {hint}") from error
        self.num_classes = self.num_classes or len(self.class_names)

    def read(self) -> Splits:
        """List the files of the three folders."""
        train = self._part("train")
        val = self._part("val")
        test = self._part("test")
        assert train is not None  # its classes have been found
        if test is None:
            train, test = self.hold_out(train, self.test_fraction)
        if val is None:
            train, val = self.hold_out(train, self.val_fraction)
        return Splits(train, val, test)

    def _part(self, part: str) -> Labelled | None:
        folder = Path(self.root) / part
        if not folder.is_dir():
            return None
        unknown = set(find_classes(folder)[0]) - set(self.class_names)
        if unknown:
            raise UserError(
                f"{str(folder)!r} has classes that are not in train/: {', '.join(sorted(unknown))}. Add them there, or "
                "remove them: no model can have learned them."
            )
        pictures = make_dataset(folder, self.class_numbers, IMG_EXTENSIONS, allow_empty=part != "train")
        if self.check_pictures or self.skip_broken:
            pictures = self._readable(pictures)
        return Labelled(
            np.array([path for path, _ in pictures], dtype=object), torch.tensor([number for _, number in pictures])
        )

    def _readable(self, pictures: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = list(pool.map(why_unreadable, [path for path, _ in pictures], chunksize=16))
        broken = [problem for problem in problems if problem]
        count = f"{len(broken):,} of {len(pictures):,} pictures cannot be read"
        if broken and not self.skip_broken:
            listed = "; ".join(broken[:MOST_LISTED])
            raise UserError(f"{count}: {listed}. Remove them, or leave them out: data.skip_broken=true.")
        if broken:
            print(f"Warning: {count} and are left out, such as {printable(broken[0])}.", file=sys.stderr)
        return [picture for picture, problem in zip(pictures, problems) if not problem]


def why_unreadable(path: str) -> str:
    """Return a picture's file and why it cannot be decoded; an empty text if it can."""
    try:
        read_picture(path)
    except UserError as error:
        return f"{path} ({error.__cause__})"
    return ""
