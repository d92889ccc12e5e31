"""Jobs of a sweep whose Trainer starts a process for each device: each is a process of its own, as outside of a sweep.

The other ranks would start again with the command line of the sweep.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_ga.app.other_tools import is_override
from lightning_ga.app.run_files import RESULT, read_json
from lightning_ga.app.terminal import Interrupted
from lightning_ga.errors import UserError


def run_apart(folder: Path, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Run this job in a process of its own and in this folder, and return its result."""
    process = subprocess.Popen([sys.executable, "-m", "lightning_ga.train", *words_of_job(folder, arguments)])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # a terminal sends it to both
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    for signum in (signal.SIGINT, signal.SIGTERM):
        if code == 128 + signum:
            raise Interrupted(signum, f"the jobs that are done are in {HydraConfig.get().sweep.dir}.")
    if code:
        raise UserError(f"its process ended with exit code {code}, see above.")
    return read_json(folder / RESULT)


def words_of_job(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The command line of this job alone: its overrides, in its folder, which the sweep has looked at."""
    own: Any = HydraConfig.get()
    task: Any = OmegaConf.to_container(own.overrides.task, resolve=False)
    words = [word for word in arguments if not is_override(word) and word not in ("-m", "--multirun")]
    words += task
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    words += [f'hydra.run.dir="{quoted}"', f"hydra.job.num={own.job.num}", "hydra.mode=RUN"]
    if "own_folder" in own.callbacks:
        words.append("~hydra.callbacks.own_folder")
    return words
