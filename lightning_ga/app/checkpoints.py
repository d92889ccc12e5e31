"""Write checkpoints that are complete or absent, and say which one ``ckpt_path=last|best|FOLDER|PATH`` means.

Lightning writes to the folder of temporary files and moves the result (``fabric/utilities/cloud_io.py``,
``_atomic_save``). Where that folder lies on another disk, moving is copying, and a process that is killed meanwhile
leaves a torn file in place of the checkpoint before it. Even on one disk nothing is flushed: after a loss of power the
new name may stand for old or missing bytes. Here a checkpoint is flushed to the disk beside its name, then renamed.

``last`` and ``best`` belong to the latest run of the same model on the same classes, by the resolved configurations
that runs save. Beside it: ``model.init_from=weights.pt``, which starts a model from bare weights.
"""

import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped] # it ships no types
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins import TorchCheckpointIO as LegacyTorchCheckpointIO
from torch import Tensor, nn

from lightning_ga.app.errors import one_line
from lightning_ga.app.run_files import read_config
from lightning_ga.app.values import settings, walk
from lightning_ga.errors import UserError, printable

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


BUILT_ELSEWHERE = ("optimizer", "lr_scheduler")  # they do not decide whether weights fit
RECIPE = ("data", "model", "optimizer", "lr_scheduler", "accumulate", "precision")
NOT_RECIPE = {  # keys of these sections that change no result
    *("root", "download", "num_workers", "eval_batch_size", "check_pictures", "skip_broken"),
    *("micro_batch_size", "max_micro_batch_size", "memory_budget", "cache", "verify"),
    *("objective", "micro_batching", "on_oom", "size_of"),
}
TRAINED_WITH = ("optimizer", "lr_scheduler", "accumulate")  # sections that a test does not use
# If an effective batch is asked for, what would make it else does not count.
ASKED, FACTORS = "accumulate.effective_batch_size", ("accumulate_grad_batches", "devices", "num_nodes")
MOST_TOLD = 6
OF_ALL: dict[str, Any] = {  # what Lightning takes from a checkpoint without looking at it
    "state_dict": {str: Tensor},
    "global_step": int,
    "epoch": int,
    "pytorch-lightning_version": str,
}
OF_A_FIT = OF_ALL | {
    "loops": {str: dict},
    "callbacks": {str: dict},
    "lr_schedulers": [dict],
    "optimizer_states": [dict],
}
WRAPPERS = re.compile(r"((module|model|net|_orig_mod)\.)*")  # what they put before the names of weights


def find_checkpoint(wanted: str, model: Mapping[str, Any], roots: Sequence[Path], *, kind: str = "last") -> Path:
    """The file that ``ckpt_path`` means."""
    path = latest(wanted, model, roots) if wanted in ("last", "best") else Path(wanted)
    if path.is_dir():
        names = dict.fromkeys((kind, "last", "best"))
        files = [place / f"{name}.ckpt" for place in (path / "checkpoints", path) for name in names]
        path = next((file for file in files if file.is_file()), path)
    if path.is_dir():
        raise UserError(
            f"ckpt_path={path} is a folder without checkpoints/last.ckpt and best.ckpt: give that of a run."
        )
    if path.suffix == ".safetensors":
        raise UserError(f"ckpt_path={wanted} holds weights alone: start from them with model.init_from={wanted}.")
    if not path.is_file():
        raise UserError(
            f"ckpt_path={wanted} is not a file; give last, best, the folder of a run or the path of a .ckpt file."
        )
    return path


def latest(kind: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Path:
    """The latest ``last`` or ``best`` checkpoint of a run of a model, below some folders."""
    path = next(written(f"{kind}.ckpt", model, roots), None)
    if path is not None:
        return path
    folders = " or ".join(f"{str(root)!r}" for root in roots)
    raise UserError(f"ckpt_path={kind}: no run of this model below {folders} has left one; train it first.")


def written(name: str, model: Mapping[str, Any], roots: Sequence[Path]) -> Iterator[Path]:
    """Files of a name that runs of a model have written, or of any if none is given, the latest first."""
    files = [path for root in roots for path in root.glob(f"**/checkpoints/{name}")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if not model or architecture(read_config(path.parent.parent).get("model") or {}) == architecture(model):
            yield path


def architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a ``model`` section that the weights depend on."""
    return {key: value for key, value in model.items() if key not in (*BUILT_ELSEWHERE, "pretrained", "init_from")}


def damage(path: Path) -> str | None:
    """What is wrong with an archive of ``torch.save``, by the checksums in it, which torch does not look at."""
    try:
        if not zipfile.is_zipfile(path):
            return "its end is missing, as when writing or copying it was cut off"
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                return "it is compressed, which torch.save does not do"
            # torch can be told to write no checksums
            torn = archive.testzip() if any(member.CRC for member in members) else None
    except Exception as error:  # of a list of contents whose bytes have changed
        torn = str(error)
    return f"its bytes have changed since it was written: {torn}" if torn else None


def read_safely(path: Path) -> Any:
    """What a whole file of ``torch.save`` holds, if that is tensors and plain values only: nothing is built from it."""
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
        reason, cause = damage(path) if is_archive else None, None
        if reason is None:
            mapped = is_archive and str(path).isprintable()  # of paths that are not UTF-8 torch takes open files alone
            try:
                file.seek(0)
                return torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
            except Exception as error:  # on bytes that are no pickle the unpickler fails in any way
                unsafe = re.search(r"GLOBAL (\S+)", str(error))
                reason = str(error.strerror) if isinstance(error, OSError) else "its bytes are something else"
                reason = f"it holds {unsafe[1]}, which loading would build" if unsafe else reason
                cause = error
    raise UserError(
        f"{str(path)!r} is no file of tensors and plain values ({reason}): give one as torch.save or a run writes it."
    ) from cause


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind: a type, or a mapping or list of one; numbers are counts."""
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(kind, type):
        return isinstance(value, kind)
    inner = kind[str] if isinstance(kind, dict) else kind[0]
    several = value.values() if isinstance(value, dict) else value
    return isinstance(value, type(kind)) and all(fits(one, inner) for one in several)


def require_checkpoint(path: Path, content: Any, *, fit: bool = False) -> None:
    """Refuse what is no checkpoint of a Lightning run, or none that a ``fit`` can go on with."""
    found = content if isinstance(content, Mapping) else {}
    is_run = "state_dict" in found and "global_step" in found
    has_weights = "state_dict" in found or any(isinstance(value, Tensor) for value in found.values())
    if not is_run and not has_weights:
        raise UserError(
            f"{str(path)!r} is no checkpoint of a run: give ckpt_path=last, ckpt_path=best or a run's folder."
        )
    if not is_run or (fit and not found.get("optimizer_states") and found["global_step"]):
        raise UserError(
            f"{str(path)!r} holds weights alone, and no state of {'an optimizer' if is_run else 'a run'}: start from "
            f"them with model.init_from={path}, without ckpt_path."
        )
    wrong = [name for name, kind in (OF_A_FIT if fit else OF_ALL).items() if not fits(found.get(name), kind)]
    try:
        leaves = [leaf for key, leaf in walk(found.get("loops") or {}) if "combined_loader" not in key]
        texts = [text for _, text in walk(found.get("callbacks")) if isinstance(text, str)]
    except RecursionError:
        leaves, texts = [None], []
    counts = all(isinstance(leaf, bool | Mapping) or fits(leaf, int) for leaf in leaves)  # and flags
    if not counts or (fit and not wrong and "epoch_progress" not in found["loops"].get("fit_loop", ())):
        wrong.append("loops")
    if any(".." in Path(text).parts for text in texts):
        wrong.append("callbacks")  # paths of files that Lightning may remove
    if wrong:
        raise UserError(
            f"{str(path)!r} is no checkpoint that Lightning wrote: {wrong[0]} is missing, or is something else."
        )


def require_same_model(path: Path, saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose weights are those of another model."""
    shapes = [name for name in saved if name in model and saved[name].shape != model[name].shape]
    counts = {
        "are missing": sorted(model.keys() - saved.keys()),
        "are unknown": sorted(saved.keys() - model.keys()),
        "have another shape": shapes,
    }
    told = [f"{len(names)} weights {what} (such as {names[0]})" for what, names in counts.items() if names]
    if told:
        raise UserError(
            f"{str(path)!r} is the checkpoint of another model: {', '.join(told)}. Give the model= and data= of its "
            f"run (they stand in {str(path.parent.parent / 'config.yaml')!r}), or a checkpoint of this model."
        )


def require_same_optimizer(path: Path, content: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another kind of optimizer, or of other weights; those of this one need no values."""
    groups = [group for state in content["optimizer_states"] for group in state.get("param_groups", ())]
    missing = {name for group in groups for name in optimizer.defaults.keys() - group.keys()}
    odd = {
        name for group in groups for name, value in group.items() if not is_alike(value, optimizer.defaults.get(name))
    }
    states = [pair for one in content["optimizer_states"] for pair in one.get("state", {}).items()]
    saved = Counter(shapes_of(state) for _, state in states)
    places = {place for group in groups for place in group.get("params", ()) if isinstance(place, int)}
    strays = any(place not in places for place, _ in states)  # torch would keep them, and use none
    wanted = None if missing or odd or not content.get("global_step") else state_after_a_step(optimizer, groups)
    if wanted is not None and (strays or saved - wanted or (any(wanted) and not any(saved))):
        missing = {"state that fits its weights"}
    if missing or odd:
        told = (
            f"it has no {', '.join(sorted(missing))}" if missing else f"other values are its {', '.join(sorted(odd))}"
        )
        raise UserError(
            f"{str(path)!r} holds the state of another optimizer than {type(optimizer).__name__} ({told}): give the "
            f"optimizer= of its run, or start from its weights with model.init_from={path}."
        )


def is_alike(value: Any, default: Any) -> bool:
    """Whether a saved setting of an optimizer is of the kind of its default."""
    if isinstance(default, list | tuple):
        several = isinstance(value, list | tuple) and len(value) == len(default)
        return several and all(map(is_alike, value, default))
    if isinstance(default, int | float) and not isinstance(default, bool):
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        return is_number and math.isfinite(value)
    return default is None or isinstance(value, type(default))


def shapes_of(state: Mapping[str, Any]) -> frozenset[tuple[str, torch.Size]]:
    """Names and shapes of the tensors that an optimizer keeps for one weight."""
    return frozenset((name, value.shape) for name, value in state.items() if isinstance(value, Tensor))


def state_after_a_step(optimizer: torch.optim.Optimizer, saved: Sequence[Any]) -> "Counter[Any] | None":
    """What an optimizer keeps for its weights after a step with saved settings; nothing if it cannot take one here."""
    group = optimizer.param_groups[0]
    try:
        group.update({name: value for name, value in saved[0].items() if name != "params"})
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
    except Exception:  # some take closures, sparse gradients, or values
        return None
    return Counter(shapes_of(optimizer.state[weight]) for weight in group["params"])


def differences(path: Path, config: Mapping[str, Any], *, fit: bool) -> str | None:
    """What of data, model and recipe is not as in the run that wrote a checkpoint, in one sentence."""
    saved = read_config(path.parent.parent)
    if not saved:
        return None
    then, now = recipe(saved, fit=fit), recipe(config, fit=fit)
    changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    if all(any(key.startswith(ASKED) and value for key, value in each.items()) for each in (then, now)):
        changed = [key for key in changed if key.rpartition(".")[2] not in FACTORS]
    if not changed:
        return None
    told = [f"{key} ({then.get(key, 'not set')} then, {now.get(key, 'not set')} now)" for key in changed[:MOST_TOLD]]
    more = f" and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
    return f"This run is not as the one that wrote the checkpoint: {', '.join(told)}{more}."


def recipe(config: Mapping[str, Any], *, fit: bool) -> dict[str, Any]:
    """The settings that change the result of a training, or of a test, by their full keys."""
    sections = {name: config.get(name) for name in RECIPE if fit or name not in TRAINED_WITH}
    if isinstance(sections["model"], Mapping):
        sections["model"] = architecture(sections["model"])
    trainer = config.get("trainer") or {} if fit else {}
    sections["trainer"] = {key: trainer[key] for key in (*FACTORS, "gradient_clip_val") if key in trainer}
    return {key: value for key, value in settings(sections).items() if not {*key.split(".")} & NOT_RECIPE}


def load_initial_weights(model: nn.Module, name: str) -> str:
    """Load the weights of a file (of ``torch.save`` or safetensors) that fit a model, or its ``net`` where it has one.

    Return what was loaded, in one sentence. A classifier's last layer for other classes is left as it was drawn.
    """
    path = Path(name)
    if not path.is_file():
        raise UserError(f"model.init_from={name} is not a file: give the path of weights, such as weights.pt.")
    net: nn.Module = getattr(model, "net", model)
    wanted, found = net.state_dict(), read_weights(path)
    shapes = {key: value.shape for key, value in wanted.items()}
    named = (found, {WRAPPERS.sub("", key, count=1): value for key, value in found.items()})
    usable = ({key: value for key, value in weights.items() if shapes.get(key) == value.shape} for weights in named)
    fitting = max(usable, key=len)
    if not fitting:
        raise UserError(
            f"model.init_from={name}: none of its {len(found)} weights ({', '.join([*found][:1])}…) is one of this "
            f"model ({next(iter(wanted))}…): choose the model that they belong to."
        )
    try:
        net.load_state_dict(fitting, strict=False)
    except RuntimeError as error:  # quantized ones, or without values
        raise UserError(f"model.init_from={name} holds weights that cannot be copied: {one_line(error)}") from error
    left = sorted(wanted.keys() - fitting.keys())
    rest = (
        f"; {len(left)} keep their first values: {', '.join(left[:4])}{', …' if len(left) > 4 else ''}" if left else ""
    )
    return printable(f"Weights: {len(fitting)} of {len(wanted)} from {path}{rest}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file by their names."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except Exception as error:
            raise UserError(f"{str(path)!r} is no whole file of safetensors: {one_line(error)}.") from error
    content: Any = read_safely(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    pairs = content.items() if isinstance(content, Mapping) else ()
    return {str(key): value for key, value in pairs if isinstance(value, Tensor)}
