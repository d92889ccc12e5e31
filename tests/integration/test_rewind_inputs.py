"""Programs of many kinds meet an out-of-memory error. The oracle: the same training on stock Lightning without one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import Faults
from lightning.pytorch.utilities import CombinedLoader
from reference import Samples, network, quiet_trainer
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate, get_worker_info

from lightning_ga import AutoAccumulate, UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(many workers|`__len__`|Length of IterableDataset|number of training batches)"
    ),
]
SAMPLES, BATCH = 48, 8  # full windows: stock Lightning weighs the last one wrongly if it is ragged
BOTH = ("loader", "step")
ERRORS = ((0.1,), (0.35, 0.4), (0.8,))  # where memory runs out, in parts of a training


class Rows(Samples):
    """Dictionaries."""

    def __init__(self, size: int = SAMPLES) -> None:
        super().__init__(size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class Stream(IterableDataset):
    """The rows in order, shared out over data workers; ``says`` is its length, which may be wrong."""

    def __init__(self, size: int, says: int | None = None) -> None:
        self.rows, self.size = Rows(size), size
        if says is not None:
            self.__class__ = type("Sized", (Stream,), {"__len__": lambda self: says})

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[index] for index in range(first, self.size, step))


def inputs_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["inputs"], batch["labels"]


class Program(pl.LightningModule):
    """A loss of a batch; memory runs out from the start of its steps to the ends of their backward passes."""

    def __init__(
        self,
        read: Callable[[Any], tuple[Tensor, Tensor]] = inputs_and_labels,
        *,
        faults: Faults | None = None,
        optimizer: Callable[..., Any] = torch.optim.SGD,
        frequency: int = 1,
    ) -> None:
        super().__init__()
        self.net, self.read, self.faults, self.make = network(), read, faults or Faults(), optimizer
        self.frequency = frequency
        self.rates: list[float] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.faults.armed = True
        inputs, labels = self.read(batch)
        loss = mse_loss(self.net(inputs), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(inputs))
        return loss

    def on_after_backward(self) -> None:
        self.faults.armed = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


@dataclass
class Run:
    """What a training leaves behind."""

    weights: Tensor
    epoch_mean: Tensor
    rates: list[float]
    validated: list[int]
    steps: int
    operations: int  # in which memory may run out


def train_program(data: Any, *callbacks: Any, at: tuple[int, ...] = (), **settings: Any) -> Run:
    """Train a program on data that are made anew for each training."""
    of_module = {name: settings.pop(name) for name in ("read", "optimizer", "frequency") if name in settings}
    faults = Faults(*at)
    module = Program(faults=faults, **of_module)
    trainer = quiet_trainer(*callbacks, **settings)
    with faults:
        trainer.fit(module, data(), DataLoader(Rows(4), batch_size=4))
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    mean = trainer.callback_metrics["loss_epoch"]
    return Run(weights, mean, module.rates, module.validated, trainer.global_step, faults.count)


def accumulate(mode: str = "loader", **settings: Any) -> AutoAccumulate:
    """Micro-batches as large as the loader's batches, until memory runs out."""
    return AutoAccumulate(**{"micro_batch_size": BATCH, "verify": False, "micro_batching": mode, **settings})


def same(ours: Run, stock: Run, tolerance: float = 1e-12) -> None:
    assert float((ours.weights - stock.weights).norm() / stock.weights.norm()) <= tolerance
    assert float(ours.epoch_mean) == pytest.approx(float(stock.epoch_mean), rel=1e-10)
    assert ours.rates == pytest.approx(stock.rates, rel=1e-12)
    assert (ours.steps, ours.validated) == (stock.steps, stock.validated)


def loader_of_rows(size: int = SAMPLES, **settings: Any) -> DataLoader:
    return DataLoader(Rows(size), **{"batch_size": BATCH, **settings})


# --- batches whose containers a step or a hook changes ---


class Object:
    """A batch that is an object of its own, such as one of graphs."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    @property
    def num_graphs(self) -> int:
        return len(self.rows)

    def to_data_list(self) -> list[dict[str, Tensor]]:
        return self.rows

    @classmethod
    def from_data_list(cls, rows: list[dict[str, Tensor]]) -> "Object":
        return cls(list(rows))


@dataclass
class Fields:
    inputs: Tensor
    labels: Tensor


def stacked(rows: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([row[name] for row in rows])


def popped(batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch.pop("labels")
    return batch["inputs"], labels


def popped_within(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["inputs"], batch["more"].pop()["labels"]


def written(batch: Any) -> tuple[Tensor, Tensor]:
    assert "seen" not in batch
    batch["seen"], batch["inputs"] = batch["inputs"], batch["inputs"] * 2
    return inputs_and_labels(batch)


def hung_on(batch: Object) -> tuple[Tensor, Tensor]:
    assert not hasattr(batch, "seen")
    batch.seen = torch.ones(3)
    return stacked(batch.rows, "inputs"), torch.stack([row.pop("labels") for row in batch.rows])


def of_fields(batch: Fields) -> tuple[Tensor, Tensor]:
    batch.labels = batch.labels * 2
    return batch.inputs, batch.labels


def as_fields(rows: list[dict[str, Tensor]]) -> Fields:
    return Fields(stacked(rows, "inputs"), stacked(rows, "labels"))


def nested(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {"inputs": stacked(rows, "inputs"), "more": [{"labels": stacked(rows, "labels")}]}


class Replaces(pl.Callback):
    """Replaces values of a batch before its step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch.labels = batch.labels * 3 + 1


def doubled_in_place(batch: Any) -> tuple[Tensor, Tensor]:
    batch["inputs"].mul_(2)
    return inputs_and_labels(batch)


def doubled_within(batch: Object) -> tuple[Tensor, Tensor]:
    batch.rows[0]["inputs"].mul_(2)
    return stacked(batch.rows, "inputs"), stacked(batch.rows, "labels")


# --- loaders that are DataLoaders by name only, samplers whose length is more or less than they yield ---


class Zipped(DataLoader):
    """Yields batches of two loaders."""

    def __init__(self, one: DataLoader, other: DataLoader) -> None:
        super().__init__(one)
        self.other = other

    def __iter__(self) -> Iterator[Any]:
        for one, other in zip(self.dataset, self.other):
            yield {"one": one, "other": other}


def apart(batch: Any) -> tuple[Tensor, Tensor]:
    return tuple(torch.cat([batch[name][part] for name in ("one", "other")]) for part in ("inputs", "labels"))


def of_both(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["one"]["inputs"] + batch["other"]["inputs"], batch["one"]["labels"]


class Off(Sampler[int]):
    """Yields all samples, and says another number, by which stock counts batches."""

    def __init__(self, says: int) -> None:
        self.says = says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


# --- the table ---


@dataclass(frozen=True)
class Row:
    """A program: its data, how it reads a batch, and what else is set."""

    data: Callable[[], Any]
    read: Any = inputs_and_labels
    modes: tuple[str, ...] = BOTH
    callbacks: tuple[Callable[[], Any], ...] = ()
    ours: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"accumulate_grad_batches": 2})


def collated(collate: Any, read: Any, **more: Any) -> Row:
    return Row(lambda: loader_of_rows(collate_fn=collate), read, **more)


def stream(says: int | None, frequency: int) -> Row:
    """Fifty samples, whatever is said; ragged last batches step, a schedule by step keeps its frequency."""
    settings = {"frequency": frequency, "val_check_interval": 1.0}
    data = lambda: DataLoader(Stream(50, says), batch_size=12)  # noqa: E731
    return Row(data, modes=("loader",), ours={"micro_batch_size": 12}, settings=settings)


ROWS: dict[str, Row] = {
    "labels that are popped": collated(None, popped),
    "labels that are popped within": collated(nested, popped_within),
    "results that are written": collated(None, written),
    "an attribute that is hung on an object, whose labels are popped": collated(Object, hung_on),
    "a field that is replaced": collated(as_fields, of_fields),
    "a field that a callback replaces": collated(
        as_fields, lambda batch: (batch.inputs, batch.labels), callbacks=(Replaces,)
    ),
    "tensors that are overwritten, and read again": collated(None, doubled_in_place, modes=("loader",)),
    "two loaders, zipped": Row(
        lambda: Zipped(loader_of_rows(), loader_of_rows()),
        of_both,
        ("loader",),
        ours={"micro_batch_size": 3},
        settings={},
    ),
    "two loaders, one of which ends in a smaller batch": Row(
        lambda: CombinedLoader({"one": loader_of_rows(), "other": loader_of_rows(23, batch_size=4)}, "min_size"),
        apart,
        ("loader",),
    ),
    "a stream": stream(None, 1),
    "a stream that says more": stream(60, 5),
    "a stream that says less": stream(40, 1),
    "a stream that workers share": Row(
        lambda: DataLoader(Stream(SAMPLES), BATCH, num_workers=2, persistent_workers=True), modes=("loader",)
    ),
    "a sampler that says more": Row(lambda: loader_of_rows(sampler=Off(56)), settings={}),
    "a sampler that says less": Row(lambda: loader_of_rows(sampler=Off(40)), settings={}),
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, row in ROWS.items() for mode in row.modes])
def test_errors_change_nothing_of_a_training(name: str, mode: str) -> None:
    """Weights, logged means, rates and validations are those of stock Lightning, with errors and without."""
    row = ROWS[name]

    def trained(*ours: Any, at: tuple[int, ...] = ()) -> Run:
        return train_program(row.data, *ours, *(make() for make in row.callbacks), at=at, read=row.read, **row.settings)

    stock = trained()
    if mode == "loader" and name == "a sampler that says more":  # stock waits for more; here validation does not
        stock.validated = [6, 12]
    calm = trained(accumulate(mode, **row.ours))
    same(calm, stock)
    if name.startswith("a stream") and name != "a stream that says less":
        assert len(calm.validated) == 2  # every epoch is
    for parts in ERRORS:
        ours = accumulate(mode, **row.ours)
        same(trained(ours, at=tuple(max(1, int(part * calm.operations)) for part in parts)), stock)
        assert ours.oom_events >= 1
        assert ours.plan.micro_batch_size <= row.ours.get("micro_batch_size", BATCH)


@pytest.mark.parametrize(("collate", "read"), [(None, doubled_in_place), (Object, doubled_within)])
def test_tensors_that_are_overwritten_end_a_run_that_cannot_read_them_again(collate: Any, read: Any) -> None:
    data = lambda: loader_of_rows(collate_fn=collate)  # noqa: E731
    calm = train_program(data, accumulate("step"), read=read)
    with pytest.raises(UserError, match="changed a tensor of its batch in place"):
        train_program(data, accumulate("step"), at=(calm.operations // 2,), read=read)


@pytest.mark.parametrize("mode", BOTH)
def test_a_batch_that_the_loader_cannot_make_is_never_left_out(mode: str) -> None:
    """Where it can be read by its indices, it is read in two."""
    failures = iter([False] * 50 + [True] + [False] * 1000)

    def collate(rows: list[dict[str, Tensor]]) -> Any:
        if next(failures):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return default_collate(rows)

    def trained(mode: str) -> Run:
        return train_program(lambda: loader_of_rows(collate_fn=collate), accumulate(mode), max_epochs=8)

    if mode == "loader":
        same(trained(mode), train_program(loader_of_rows, max_epochs=8))
        return
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(mode)
    assert "while the loader made a batch" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("mode", BOTH)
def test_an_error_halves_the_pass_that_failed_however_high_the_limit_was(mode: str) -> None:
    with pytest.warns(UserWarning, match=f"with {BATCH} samples .* at most {-(-BATCH // 2)} samples"):
        train_program(loader_of_rows, ours := accumulate(mode, micro_batch_size=1000 * BATCH), at=(20,))
    assert ours.oom_events == 1
