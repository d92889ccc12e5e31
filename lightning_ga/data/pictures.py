"""Picture files: which a folder holds, and which of them cannot be read."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from lightning_ga.errors import UserError

LEFT_OUT = ("__MACOSX",)
MOST_LISTED = 5
SMALL = (64, 64)  # pixels: JPEG files are decoded at a smaller scale for the check


def class_folders(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the folders in a folder, and of those left out: hidden ones and those that archives of macOS bring."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [name for name in names if not is_left_out(name)], [name for name in names if is_left_out(name)]


def is_left_out(name: str) -> bool:
    """Whether a name is one that systems leave beside a user's files."""
    return name.startswith(".") or name in LEFT_OUT


def pictures_in(folder: Path) -> list[str]:
    """Every file below a folder that Pillow can open by its ending, dangling links too, in order of name."""
    endings = Image.registered_extensions()
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
        with Image.open(path) as image:
            image.draft(image.mode, SMALL)
            image.load()
    except FileNotFoundError:
        return "a link to nothing" if Path(path).is_symlink() else "gone"
    except UnidentifiedImageError:
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
