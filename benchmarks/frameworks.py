"""What do frameworks do with accumulated gradients? ``python -m benchmarks.frameworks``, by hand before a release.

Each framework is installed, pinned, into an environment of its own in a temporary folder, by uv; those on PyTorch use
the one of this environment. There ``benchmarks.loops`` trains two epochs of its program, which the audit measures.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import benchmark, shown

ROOT = Path(__file__).parents[1]
FACTOR, MICRO_BATCHES, EPOCHS = 4, 11, 2  # of benchmarks.loops
PINS: dict[str, tuple[str, ...]] = {
    "lightning": (),
    "fabric": (),
    "accelerate": ("accelerate==1.15.0",),
    "transformers": ("transformers==5.24.0", "accelerate==1.15.0"),
    "transformers_stream": ("transformers==5.24.0", "accelerate==1.15.0"),
    "composer": ("mosaicml==0.32.1",),
    "deepspeed": ("deepspeed==0.19.8",),
    "fastai": ("fastai==2.8.12",),
    "ignite": ("pytorch-ignite==0.5.5",),
    "skorch": ("skorch==1.4.0",),
    "mmengine": ("mmengine==0.10.7", "setuptools<81"),
    "poutyne": ("poutyne==1.19.0",),
    "pytorch_accelerated": ("pytorch-accelerated==0.1.61",),
    "torchtnt": ("torchtnt==0.2.4", "setuptools<81"),
    "catalyst": ("catalyst==22.4",),
    "keras_tensorflow": ("keras==3.15.1", "tensorflow-cpu==2.21.0"),
    "keras_jax": ("keras==3.15.1", "jax==0.10.2"),
    "optax": ("optax==0.2.8", "flax==0.12.8", "jax==0.10.2"),
    "flax": ("optax==0.2.8", "flax==0.12.8", "jax==0.10.2"),
    "paddle": ("paddlepaddle==3.3.1",),
}
MISSING = {
    "SpeechBrain 1.1.2": "needs a torchaudio built for the PyTorch in use, and there is none for 2.15",
    "sentence-transformers 6.2.0": "trains with the Trainer of Transformers; a model needs a tokenizer from a hub",
    "spaCy 3.8.18": "cuts each batch by itself and sums; its layers are not PyTorch's",
    "flair 0.15.1": "cuts each batch by itself; a model needs a corpus",
    "Ludwig 0.11.0": "builds its model and data from a configuration",
    "timm": "its training script is not in the package",
}
SHARED = ("torch", "torchvision", "torchaudio", "triton")


def measured(name: str, pins: Sequence[str], folder: Path) -> dict[str, Any]:
    """Install a framework, and audit its program."""
    environment = folder / name
    python = environment / "bin" / "python"
    excluded = folder / "shared.txt"
    excluded.write_text("\n".join(SHARED))
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, environment], check=True)
    packages = sysconfig.get_paths()["purelib"]
    (python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "shared.pth").write_text(
        packages
    )
    if pins:
        install = ["uv", "pip", "install", "-q", "--python", python, "--excludes", excluded, *pins]
        subprocess.run(install, check=True)
    result = folder / f"{name}.json"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "benchmarks.loops", name, result]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=folder, timeout=600)
    if not result.exists():
        return {"failed": ended.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def measure(names: tuple[str, ...] = tuple(PINS)) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"\r{name} …".ljust(40), end="", flush=True)
            rows.append({"name": name, "pins": PINS[name], **measured(name, PINS[name], Path(folder))})
    missed = [f"{row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return {"rows": [row for row in rows if "failed" not in row], "missing": MISSING, "missed": missed}


def of_whole_windows(row: Mapping[str, Any]) -> str:
    """Mean or sum, of windows of equal micro-batches.

    Examples:
        >>> of_whole_windows({"tail": {"steps": [{"weights": [0.25] * 4, "verdict": "mean over samples"}]}})
        'mean'
    """
    verdicts = {step["verdict"] for step in row["tail"]["steps"] if len(step["weights"]) == FACTOR}
    return "sum" if "sum" in verdicts else "mean"


def of_last_window(row: Mapping[str, Any]) -> str:
    """What happens to the three micro-batches that are left at the end of an epoch."""
    tail = row["tail"]
    carried = [len(step["weights"]) for step in tail["steps"] if step["verdict"] == "carried over"]
    if carried:
        return "goes on" if max(carried) == FACTOR else "added on"
    last = tail["steps"][-1]["verdict"]
    words = {"last window divided by the factor": "÷ factor", "mean over micro-batches": "÷ its number"}
    return "dropped" if tail["dropped"] else words.get(last, last.replace("mean over", "by"))


def of_unequal(row: Mapping[str, Any]) -> str:
    """How a micro-batch of two samples is weighed beside three of four."""
    for step in row["unequal"]["steps"]:
        weights = dict(zip(step["micro_batches"], step["weights"]))
        if 4 in weights and 3 in weights:
            return {1.0: "equally", 0.5: "by samples"}.get(round(weights[4] / weights[3], 3), "otherwise")
    return "–"


def of_schedule(row: Mapping[str, Any]) -> str:
    """What a schedule of the learning rate counts, if the program has one."""
    counted = row["tail"].get("schedule_steps")
    if counted is None:
        return "–"
    return {len(row["tail"]["steps"]): "steps", EPOCHS * MICRO_BATCHES: "batches"}.get(counted, str(counted))


def of_clipping(row: Mapping[str, Any]) -> str:
    """Whether clipping applies to the gradient of the window."""
    if "clipped" not in row:
        return "–"
    return "its parts" if row["clipped"]["verdict"] == "not a combination" else "window"


def text(record: Mapping[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        cells = (of_whole_windows(row), of_last_window(row), of_unequal(row), of_schedule(row), of_clipping(row))
        rows.append((row["name"].replace("_", " "), *cells))
    missing = "\n".join(f"Not measured: {name}: {reason}." for name, reason in record["missing"].items())
    return shown(("", "window", "last window", "unequal", "schedule", "clipped"), (), rows, missing)


main = benchmark("frameworks", __doc__, measure, text, quick={"names": ("lightning", "fabric")})

if __name__ == "__main__":
    raise SystemExit(main())
