"""Say which file ``ckpt_path=last|best|FOLDER|PATH`` means."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from lightning_ga.app.run_files import CONFIG
from lightning_ga.checkpoints import read_safely
from lightning_ga.errors import UserError


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
