"""Your own pictures, one folder per class.

``root/train/<class>/*.png`` is needed. Where ``root/val`` or ``root/test`` are missing, a share of
the training pictures is held out for them, in the same mix of classes.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from lightning_ga.data.images import FORMATS, ImageData, Labelled, Splits, open_picture
from lightning_ga.errors import UserError, printable

LEFT_OUT = ("__MACOSX",)
MOST_LISTED = 5
SMALL = (64, 64)  # pixels: JPEG files are decoded at a smaller scale for the check


class ImageFolder(ImageData):
    """Folders of pictures: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP.

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
                f"{printable(next(iter(broken)))}.",
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
        if len(names) == 1:
            raise UserError(
                f"{str(train)!r} holds one class, {names[0]}: to tell classes apart, two are needed at least."
            )
        empty = [name for name in names if not pictures_in(train / name)]
        if empty:
            raise UserError(
                f"{str(train)!r} has classes without a picture: {', '.join(empty)}. Remove these folders, or "
                "put pictures into them."
            )
        if left_out:
            names_left = printable(", ".join(left_out))
            print(f"Warning: no classes, and left out, are {names_left} in {printable(train)}.", file=sys.stderr)
        return names


def class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the folders in a folder, and of those left out: hidden ones and those that archives of macOS bring."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [name for name in names if not is_left_out(name)], [name for name in names if is_left_out(name)]


def is_left_out(name: str) -> bool:
    """Whether a name is one that systems leave beside a user's files."""
    return name.startswith(".") or name in LEFT_OUT


def pictures_in(folder: Path) -> list[str]:
    """Every file below a folder that ends as pictures do, dangling links too, in order of name."""
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
    found = [path for path in folder.rglob("*") if path.suffix.lower() in endings]
    return [str(path) for path in sorted(found) if not any(map(is_left_out, path.relative_to(folder).parts))]


def unreadable(paths: Sequence[str]) -> dict[str, str]:
    """Those of some picture files that cannot be decoded, each with the reason. All are read, several at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(why_unreadable, paths, chunksize=16)
        return {path: reason for path, reason in zip(paths, reasons) if reason}


def why_unreadable(path: str) -> str:
    """Why a picture cannot be decoded; an empty text if it can."""
    try:
        with open_picture(path) as image:
            image.draft(image.mode, SMALL)
            image.load()
    except FileNotFoundError:
        return "a link to nothing" if Path(path).is_symlink() else "gone"
    except UserError as error:
        if not isinstance(error.__cause__, UnidentifiedImageError):
            return "no regular file"
        return "no picture" if Path(path).stat().st_size else "empty"
    except Exception as error:  # Pillow's readers raise errors of many kinds on broken files
        return str(error).strip().split("\n")[0] or type(error).__name__
    return ""


def refuse_unreadable(broken: dict[str, str]) -> UserError:
    """The error that lists the files that cannot be read."""
    listed = "; ".join(f"{path} ({reason})" for path, reason in list(broken.items())[:MOST_LISTED])
    more = f"; and {len(broken) - MOST_LISTED} more" if len(broken) > MOST_LISTED else ""
    count = "1 picture" if len(broken) == 1 else f"{len(broken):,} pictures"
    return UserError(
        f"{count} cannot be read: {listed}{more}. Mend or remove them, or leave them out: data.skip_broken=true."
    )
