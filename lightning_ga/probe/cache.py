"""Remember what probes found between runs: one small JSON file in the user's cache for each kind of training step.

A step is described by its layers, the shapes of its data, and its settings. A description that changes costs a probe;
code that changes is caught by the step that verifies a remembered limit. The files may be deleted at any time.
"""

import json
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_ga.batch.layout import leaves
from lightning_ga.batch.pytree import tensors_in
from lightning_ga.memory.device import total_memory
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.config import Options
from lightning_ga.plan.records import ProbeResult, read_probe
from lightning_ga.snapshot.copies import sparse_parameters

_VERSIONS = ("lightning_ga", "torch", "lightning")


def remembered(step: Mapping[str, Any]) -> ProbeResult | None:
    """Return what a probe of this step found; ``None``, with a warning if its file cannot be read."""
    path = _path(step)
    try:
        return read_probe(json.loads(path.read_text(encoding="utf-8"))["probe"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{path} cannot be read ({type(error).__name__}: {error}), so the limit is looked for again."
        warnings.warn(problem, stacklevel=1)
        return None


def remember(step: Mapping[str, Any], result: ProbeResult) -> None:
    """Keep a result, whole or not at all: a new file is written, which then replaces the old one."""
    path = _path(step)
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"step": step, "probe": asdict(result)}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        problem = f"{path} cannot be written ({type(error).__name__}: {error}), so the limit is not remembered."
        warnings.warn(problem, stacklevel=1)


def forget(step: Mapping[str, Any]) -> None:
    """Delete what is remembered of this step, so that the next run looks for the limit again."""
    with suppress(OSError):  # what cannot be deleted is verified by a step before it is used
        _path(step).unlink()


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "lightning_ga"
    with suppress(RuntimeError):  # a user without a home: in a container, whose files last as long as it does
        return Path.home() / ".cache" / "lightning_ga"
    return Path(tempfile.gettempdir()) / "lightning_ga"


def _path(step: Mapping[str, Any]) -> Path:
    digest = sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}.json"


def hardware(trainer: Any, budget: int | float | str | None) -> str:
    """Describe what a limit depends on besides the user's code: device, memory, budget, precision, ranks, versions."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} {properties.total_memory}"
    else:
        name = f"{device.type} {psutil.virtual_memory().total}"
    return f"{name}, budget {budget}, {trainer.precision}, {trainer.world_size} ranks, torch {torch.__version__}"


def describe_step(trainer: Any, batch_and_whole: Any, options: Options, rank_samples: int) -> dict[str, Any]:
    """Describe what a remembered limit depends on besides code, in plain values that can be written down and compared.

    The data are described by a small batch of the heaviest samples, and the whole batch that it is cut from.
    """
    module = trainer.lightning_module
    objective = options.objective
    # Timings and the rows of sparse gradients depend on the window.
    windows = None
    if objective != "memory" or sparse_parameters(module):
        windows = rank_samples
    return {
        "model": sha256("\n".join(_parts(module)).encode()).hexdigest(),
        "batch": str([*leaves(batch_and_whole)]),
        "types": [str(tensor.dtype) for tensor in tensors_in(batch_and_whole)],
        "optimizers": [type(optimizer).__qualname__ for optimizer in trainer.optimizers],
        "callbacks": sorted(type(callback).__name__ for callback in trainer.callbacks),
        "clipping": [str(trainer.gradient_clip_val), str(trainer.gradient_clip_algorithm)],
        "strategy": type(trainer.strategy).__name__,
        "hardware": hardware(trainer, options.budget),
        "memory": total_memory(trainer.strategy.root_device),
        "allocator": [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
        "numerics": [
            attempt(torch.get_float32_matmul_precision, lambda _: True).result,  # refused if parts have their own
            str(torch.backends.cudnn.benchmark),
        ],
        "objective": [objective, windows, options.on_oom],
        "chunks": [str(options.whole), rank_samples] if options.whole else None,
        "checkpoint": str(options.checkpoint),
        "versions": dict(zip(_VERSIONS, map(version, _VERSIONS))),
    }


def _parts(module: torch.nn.Module) -> Iterator[str]:
    """Describe layers by their types, parameters and buffers by their shapes and types."""
    for name, part in module.named_modules():
        yield f"{name}: {type(part).__module__}.{type(part).__qualname__}"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name}: {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.layout}"
