"""Checkpoints pass between runs with the callback and runs of stock Lightning, in both directions."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader, default_collate

from lightning_ga import AutoAccumulate

CUTS: list[dict[str, Any] | None] = [
    None,
    {"micro_batch_size": 8},
    {"micro_batch_size": 3},
    {"micro_batch_size": 3, "micro_batching": "step"},
    {"micro_batch_size": 8, "micro_batching": "step"},
]


def loader(samples: int = 44) -> DataLoader[Any]:
    return DataLoader(Samples(samples), batch_size=8)


def run(
    cut: dict[str, Any] | None,
    *callbacks: Any,
    data: Any = None,
    module: Any = None,
    repeats: Any = "ignore",
    **settings: Any,
) -> Any:
    """Train with the callback, or without it where ``cut`` is ``None``."""
    ours = [] if cut is None else [AutoAccumulate(**cut, verify=False)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        warnings.filterwarnings(repeats, "You're resuming from a checkpoint that ended before")
        settings = {"max_epochs": 2, "num_sanity_val_steps": 0} | settings
        return fit(data or loader(), *ours, *callbacks, module=module or Regression(), **settings)


def checkpoints(folder: Path, cut: dict[str, Any] | None, when: dict[str, Any], **settings: Any) -> list[Path]:
    """Those of a whole run, in their order."""
    saving = pl.callbacks.ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **when)
    run(cut, saving, enable_checkpointing=True, **settings)
    return sorted(folder.iterdir(), key=lambda path: int(path.stem.split("step=")[1].split("-")[0]))


@pytest.mark.parametrize("when", [{"every_n_train_steps": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}])
@pytest.mark.parametrize(("writes", "reads"), [*zip(CUTS[1:], CUTS[1:]), (None, CUTS[1]), (None, CUTS[2])])
def test_an_epoch_that_max_steps_ended_early_is_gone_on_with(
    writes: Any, reads: Any, when: Any, tmp_path: Path
) -> None:
    """With more steps a run goes on as if it had never been stopped."""
    path = checkpoints(tmp_path, writes, when, max_steps=8)[-1]
    ours, trainer = run(reads, ckpt_path=path, max_steps=14, max_epochs=None)
    whole, never_stopped = run(reads, max_steps=14, max_epochs=None)
    assert (trainer.global_step, trainer.current_epoch) == (14, never_stopped.current_epoch)
    seen = [[index for _, indices in each.micro_batches for index in indices] for each in (ours, whole)]
    assert seen[0] == seen[1][-len(seen[0]) :]
    assert len(seen[0]) == len(seen[1]) - 44 - 16
    assert torch.allclose(ours.net[0].weight, whole.net[0].weight, atol=1e-12)


class Shelf:
    """Batches that are read where the last epoch left off, by an iterator that goes on."""

    def __init__(self) -> None:
        self.place, self.left = 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.left = 5
        return self.rest()

    def rest(self) -> Iterator[Any]:
        samples = Samples(200)
        while self.left:
            self.left, self.place = self.left - 1, self.place + 8
            yield default_collate([samples[index % 200] for index in range(self.place - 8, self.place)])

    def __len__(self) -> int:
        return 5


class Remembering(Shelf):
    """The same, which keeps its place and goes on in mid-epoch."""

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or 5
        return self.rest()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.left = state["place"], state["left"]


class StatefulLoader(DataLoader[Any]):
    """A loader that keeps its place, as torchdata's do."""

    done = skipped = 0

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.done = (number + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["done"]


@pytest.mark.parametrize("cut", CUTS)
def test_nothing_is_lost_of_data_that_go_on_where_they_were_left(cut: Any) -> None:
    module, _ = run(cut, data=Shelf())
    assert [index for _, indices in module.micro_batches for index in indices] == list(range(80))


KEEP_THEIR_PLACE: dict[str, tuple[Callable[[], Any], list[int], int]] = {
    "data": (Remembering, [*range(24, 80)], 10),
    "loader": (lambda: StatefulLoader(Samples(44), batch_size=8), [*range(24, 44), *range(44)], 12),
}


@pytest.mark.parametrize("name", KEEP_THEIR_PLACE)
@pytest.mark.parametrize(
    ("writes", "reads"), [*zip(CUTS, CUTS), *((None, cut) for cut in CUTS[1:]), (CUTS[3], None), (CUTS[2], None)]
)
def test_the_place_that_data_keep_is_saved_and_restored(writes: Any, reads: Any, name: str, tmp_path: Path) -> None:
    data, left, steps = KEEP_THEIR_PLACE[name]
    path = checkpoints(tmp_path, writes, {"every_n_train_steps": 1}, data=data())[2]
    module, trainer = run(reads, data=data(), ckpt_path=path, repeats="error")
    assert [index for _, indices in module.micro_batches for index in indices] == left
    assert trainer.global_step == steps


class Failing(Regression):
    """Ends the run in the first batch of its second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.current_epoch == 1:
            raise KeyError("an error of the user's")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("writes", "reads"), [*((cut, None) for cut in CUTS[1:]), (None, CUTS[1]), (None, CUTS[2])])
def test_a_checkpoint_of_an_error_goes_on_with_the_batch_that_failed(writes: Any, reads: Any, tmp_path: Path) -> None:
    class Saving(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "error.ckpt")

    with pytest.raises(KeyError):
        run(writes, Saving(), module=Failing())
    module, trainer = run(reads, ckpt_path=tmp_path / "error.ckpt")
    assert trainer.global_step == 12
    assert sum(len(indices) for _, indices in module.micro_batches) == 44


class Paired(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(torch.nn.functional.mse_loss(self.net(part[0]), part[1]) for part in batch)


def test_a_resume_that_repeats_samples_is_warned_of(tmp_path: Path) -> None:
    """Loaders whose place nobody keeps begin anew, as in stock Lightning."""
    cut, two = {"micro_batch_size": 4}, [loader(32), loader(32)]
    path = checkpoints(tmp_path, cut, {"every_n_train_steps": 2}, data=two, module=Paired(), max_epochs=1)[0]
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        run(cut, data=two, module=Paired(), repeats="always", ckpt_path=path, max_epochs=1)
