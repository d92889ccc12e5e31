"""Runs a fit on several gloo ranks in processes of their own; each rank writes what it saw.

Started by the tests as ``python ranks.py SETTINGS.json FOLDER``.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from lightning.pytorch import Callback  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from reference import LossBySample, Samples, StreamOf, fit  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from lightning_ga import AutoAccumulate  # noqa: E402


def main(settings: dict[str, Any], folder: Path) -> None:
    """One fit; rank 0 also saves the final weights."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*(LeafSpec|many workers|number of training batches|resource_tracker).*")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    callback = AutoAccumulate(**settings["accumulate"])
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    trainer = {"strategy": strategy, "devices": settings["ranks"], **settings.get("trainer", {})}
    dtype = getattr(torch, settings.get("dtype", "float64"))
    module = Recorder(folder, callback, dtype)
    loader = LOADERS[settings.get("loader", "shuffled")](settings["size"], settings["batch_size"], settings["ranks"])
    ckpt_path = settings.get("ckpt_path")
    fit(
        loader,
        callback,
        *([Save(folder)] if settings.get("save") else []),
        module=module,
        ckpt_path=ckpt_path,
        **trainer,
    )


class Recorder(LossBySample):
    """Writes its records when training ends: with forked ranks the parent sees none of them."""

    def __init__(self, folder: Path, callback: AutoAccumulate, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype)
        self.folder, self.callback = folder, callback

    def on_train_end(self) -> None:
        record = {
            "windows": self.windows,
            "micro_batches": self.micro_batches,
            "losses": self.losses,
            "gradients": self.gradients,
            "weights": [parameter.detach() for parameter in self.parameters()],
            "plan": repr(self.callback.plan),
            "probe": repr(self.callback.probe),
            "limit": self.callback.probe.limit if self.callback.probe else None,
        }
        torch.save(record, self.folder / f"rank{self.global_rank}.pt")


class Save(Callback):
    """A checkpoint after every optimizer step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")


def own_stream(size: int, batch_size: int, ranks: int) -> Any:
    """Every rank its own half of the samples, as streams of different ends."""

    class Share(StreamOf):
        def __iter__(self) -> Any:
            rank = torch.distributed.get_rank()
            return (self.dataset[index] for index in range(rank, size, ranks))

    return DataLoader(Share(Samples(size)), batch_size=batch_size)


LOADERS = {
    "float32": lambda size, b, _: DataLoader(Samples(size, torch.float32), b, shuffle=True),
    "float32, workers": lambda size, b, _: DataLoader(Samples(size, torch.float32), b, shuffle=True, num_workers=2),
    "shuffled": lambda size, b, _: DataLoader(Samples(size), b, shuffle=True),
    "workers": lambda size, b, _: DataLoader(Samples(size), b, shuffle=True, num_workers=1),
    "in order": lambda size, b, _: DataLoader(Samples(size), b),
    "subset": lambda size, b, _: DataLoader(Subset(Samples(size + 5), range(size)), b),
    "stream": own_stream,
}

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
