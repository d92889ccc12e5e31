"""A fit on several gloo ranks in processes of their own; each rank writes what it saw."""

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from reference import Regression, Samples, SaveAll, StreamOf, fit
from torch.utils.data import DataLoader, Sampler

from lightning_ga import AutoAccumulate
from lightning_ga.probe.trials import ProbedTrainer
from lightning_ga.testing import limit_memory


def main(settings: dict[str, Any], folder: Path) -> None:
    """One fit, in a fork that forks the ranks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*(LeafSpec|many workers|number of training batches|resource_tracker).*")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    masked = settings.get("masked", [])
    normalize = {"normalize": lambda batch: mask_of(batch, masked).sum()} if masked else {}
    callback = AutoAccumulate(**settings["accumulate"], **normalize)
    trouble = Trouble(**settings["trouble"]) if "trouble" in settings else None
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    trainer = {"strategy": strategy, "devices": settings["ranks"], **settings.get("trainer", {})}
    module = Masked(folder, callback, masked) if masked else Recorder(folder, callback)
    if trouble is not None:
        module = Troubled(folder, callback, trouble)
    loader = LOADERS[settings.get("loader", "shuffled")](settings["size"], settings["batch_size"], settings["ranks"])
    ckpt_path = settings.get("ckpt_path")
    fit(
        loader,
        callback,
        *([SaveAll(folder)] if settings.get("save") else []),
        *([] if trouble is None else [trouble]),
        module=module,
        ckpt_path=ckpt_path,
        **trainer,
    )


class Recorder(Regression):
    """Writes its records when training ends: with forked ranks the parent sees none of them."""

    def __init__(self, folder: Path, callback: AutoAccumulate) -> None:
        super().__init__()
        self.folder, self.callback = folder, callback

    def on_train_end(self) -> None:
        record = {
            "windows": self.windows,
            "micro_batches": self.micro_batches,
            "gradients": self.gradients,
            "limit": self.callback.probe.limit if self.callback.probe else None,
        }
        torch.save(record, self.folder / f"rank{self.global_rank}.pt")


class Masked(Recorder):
    """Its loss is a mean over samples that are not masked, made by hand: NaN where there are none."""

    def __init__(self, folder: Path, callback: AutoAccumulate, masked: list[int]) -> None:
        super().__init__(folder, callback)
        self.masked = masked

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mask = mask_of(batch, self.masked).double()[:, None]
        self.micro_batches.append((self.global_step, batch[2].tolist()))
        return ((self.net(batch[0]) - batch[1]).square() * mask).sum() / mask.sum()


class Trouble(Callback):
    """What befalls ranks: less memory on one, an error in a trial above a size, death."""

    def __init__(
        self,
        budgets: tuple[int, ...] = (),
        rank: int = 1,
        fails_above: float = float("inf"),
        dies_above: float = float("inf"),
    ) -> None:
        self.budgets, self.rank, self.fails_above, self.dies_above = budgets, rank, fails_above, dies_above
        self.collectives: list[str] = []
        self.in_trial = False
        self.held = ExitStack()

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.budgets:
            self.held.enter_context(limit_memory(self.budgets[trainer.global_rank]))
        self.watch()

    def watch(self) -> None:
        """Note collectives of ranks that run within trial steps."""
        run = ProbedTrainer.step

        def watched(training: ProbedTrainer, size: int, meter: Any) -> None:
            self.in_trial = True
            try:
                run(training, size, meter)
            finally:
                self.in_trial = False

        ProbedTrainer.step = watched  # type: ignore[method-assign]
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier", "reduce"):
            setattr(torch.distributed, name, self.noted(name, getattr(torch.distributed, name)))

    def noted(self, name: str, collective: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            self.collectives += [name] if self.in_trial else []
            return collective(*arguments, **more)

        return call

    def befall(self, rank: int, size: int) -> None:
        """Before a pass of so many samples."""
        if rank == self.rank and size > self.dies_above:
            os._exit(17)
        if rank == self.rank and size > self.fails_above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.held.close()


class Troubled(Recorder):
    """Keeps no tensors of its own, as memory is counted."""

    def __init__(self, folder: Path, callback: AutoAccumulate, trouble: Trouble) -> None:
        super().__init__(folder, callback)
        self.trouble = [trouble]  # in a list: a module holds no callback of its own
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trouble[0].befall(self.global_rank, len(batch[0]))
        self.sizes.append(len(batch[0]))
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_end(self) -> None:
        probe = self.callback.probe
        record = {
            "limit": probe.limit,
            "spare": probe.budget_bytes - probe.peak_bytes,
            "trials": [(trial.micro_batch_size, trial.fits) for trial in probe.trials],
            "sizes": self.sizes,
            "weights": torch.cat([parameter.detach().flatten() for parameter in self.parameters()]),
            "collectives": self.trouble[0].collectives,
        }
        torch.save(record, self.folder / f"rank{self.global_rank}.pt")


def mask_of(batch: Any, masked: list[int]) -> torch.Tensor:
    """Which samples of a batch count."""
    return ~torch.isin(batch[2], torch.tensor(masked))


class OwnBatches(Sampler[list[int]]):
    """A batch sampler that knows its rank; batches of the ranks differ in size."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        rank, start = torch.distributed.get_rank(), 20 * torch.distributed.get_rank()
        for size in ((9, 3, 5, 2), (4, 6, 1, 7))[rank]:
            yield list(range(start, start + size))
            start += size


class OwnShare(Sampler[int]):
    """A sampler that knows its rank; the ranks have 23 and 22 samples."""

    def __len__(self) -> int:
        return len(self.share())

    def __iter__(self) -> Any:
        return iter(self.share())

    def share(self) -> range:
        return range(torch.distributed.get_rank(), 45, 2)


def own_stream(size: int, batch_size: int, ranks: int) -> Any:
    """Every rank its own half of the samples, as streams of different ends."""

    class Share(StreamOf):
        def __iter__(self) -> Any:
            rank = torch.distributed.get_rank()
            return (self.dataset[index] for index in range(rank, size, ranks))

    return DataLoader(Share(Samples(size)), batch_size=batch_size)


LOADERS = {
    "shuffled": lambda size, b, _: DataLoader(Samples(size), b, shuffle=True),
    "in order": lambda size, b, _: DataLoader(Samples(size), b),
    "stream": own_stream,
    "own batches": lambda size, _, __: DataLoader(Samples(size), batch_sampler=OwnBatches()),
    "own share": lambda size, b, _: DataLoader(Samples(size), b, sampler=OwnShare()),
}
