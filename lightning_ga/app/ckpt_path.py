"""Say which file ``ckpt_path=last|best|FOLDER|PATH`` means."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Size, Tensor

from lightning_ga.app.run_files import CONFIG, SWEEP
from lightning_ga.checkpoints import read_safely
from lightning_ga.errors import UserError


def find_checkpoint(
    wanted: str, weights: Mapping[str, Tensor], roots: Sequence[Path], *, kind: str = "last", own: Path = Path()
) -> Path:
    """The file that ``ckpt_path`` means; ``last`` is that of ``own``, else the latest that fits the weights."""
    if wanted in ("last", "best"):
        return latest_of(wanted, weights, roots, own)
    path = Path(wanted).expanduser()
    if path.is_file():
        return path
    for name in (kind, "last", "best"):
        for folder in (*folders_of(path), path):
            place = in_folder(folder, name)
            if place.is_file():
                return place
    rule = "neither a file nor a folder with checkpoints/last.ckpt or best.ckpt"
    raise UserError(f"ckpt_path={wanted}: {rule}: give one of these, last or best.")


def latest_of(name: str, weights: Mapping[str, Tensor], roots: Sequence[Path], own: Path) -> Path:
    """The newest ``NAME.ckpt``: of the run's own folder, else of all but those of its sweep, if its weights fit."""
    folders = {*folders_of(own)}
    is_own = bool(folders)
    if not is_own:
        sweep = {folder for folder in own.resolve().parents if (folder / SWEEP).is_file()}  # of other new jobs
        for root in roots:
            found = root.glob("**/checkpoints/*.ckpt")
            folders |= {path.parent for path in found if not sweep & {*path.resolve().parents}}
    files = [in_folder(folder, name) for folder in folders]
    for path in sorted(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime, reverse=True):
        if is_own or fits(path, weights):
            return path
    places = " or ".join(map(repr, map(str, roots)))
    raise UserError(f"ckpt_path={name}: no run of this model below {places} has left one; train it.")


def folders_of(run: Path) -> list[Path]:
    """Where a run has left checkpoints: Lightning puts them beside the logs if a callback names no folder."""
    beside = run.glob("*/checkpoints") if (run / CONFIG).is_file() else ()
    return [folder for folder in (run / "checkpoints", *beside) if any(folder.glob("*.ckpt"))]


def in_folder(folder: Path, name: str) -> Path:
    """``NAME.ckpt``; the best one may have another name, or be in the folder of an earlier run: the latest tells."""
    path = folder / f"{name}.ckpt"
    if name != "best" or path.is_file():
        return path
    with suppress(UserError, LookupError, AttributeError, ValueError):  # no last one, or none of its callbacks watches
        latest = max(folder.glob("*.ckpt"), key=lambda one: (one.name == "last.ckpt", one.stat().st_mtime))
        states = read_safely(latest)["callbacks"]
        optimized = states.get("OptimizedMetric", {}).get("name")
        watching = [state for state in states.values() if state.get("monitor") and state.get("best_model_path")]
        best = min(watching, key=lambda state: state["monitor"] != optimized)
        path = Path(best["best_model_path"])
        if not path.is_file():
            path = folder / path.name
    return path


def fits(path: Path, weights: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint can be read and contains weights of these names and shapes."""
    with suppress(UserError, LookupError, TypeError, AttributeError):
        return shapes(read_safely(path)["state_dict"]) == shapes(weights)
    return False


def shapes(weights: Mapping[str, Tensor]) -> dict[str, Size]:
    """The shape of every weight."""
    return {name: weight.shape for name, weight in weights.items()}
