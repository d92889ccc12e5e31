"""Does training read what other libraries hand it? ``python -m benchmarks.data_libraries``, by hand before a release.

Each library loads the same regression from its own kind of data. Beside stock Lightning run `AutoAccumulate()`, the
step in pieces of three samples, an out-of-memory error in the third step, and a resume in mid-epoch. The numbers are
the relative differences of the final weights. Libraries that are not installed are left out, which the table says.
"""

import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import forked
from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate

SIZE, BATCH, FEATURES, EPOCHS = 48, 8, 5, 3
MOST = 1e-9  # relative difference
FAILS_AT, SAVES_AT = 2, 8  # optimizer steps; the second is in mid-epoch
WAYS = ("default", "step", "error", "resume")


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((SIZE, FEATURES)), rng.standard_normal((SIZE, 1))


def samples() -> list[dict[str, np.ndarray]]:
    return [{"x": x, "y": y} for x, y in zip(*rows())]


# --- the libraries -----------------------------------------------------------------------------


def of_webdataset(folder: Path) -> Any:
    import webdataset

    archive = folder / "rows.tar"
    if not archive.exists():
        with webdataset.TarWriter(str(archive)) as writer:
            for number, sample in enumerate(samples()):
                writer.write({"__key__": f"{number:03}", "x.npy": sample["x"], "y.npy": sample["y"]})
    data = webdataset.WebDataset(f"file:{archive}", shardshuffle=False).decode().to_tuple("x.npy", "y.npy")
    return webdataset.WebLoader(data.batched(BATCH), batch_size=None)


def of_litdata(folder: Path) -> Any:
    import litdata

    stored = folder / "litdata"
    if not stored.exists():
        # litdata 0.2.76 empties these folders first: by default those named chunks and data where temporary files lie
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "chunks")
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "data")
        litdata.optimize(samples().__getitem__, list(range(SIZE)), str(stored), chunk_size=16, num_workers=1)
    return litdata.StreamingDataLoader(litdata.StreamingDataset(str(stored), shuffle=False), batch_size=BATCH)


def of_datasets(_: Path, *, streams: bool = False) -> Any:
    import datasets

    x, y = rows()
    data: Any = datasets.Dataset.from_dict({"x": x, "y": y})
    if streams:
        return DataLoader(data.to_iterable_dataset().with_format("torch"), BATCH)
    return DataLoader(data.with_format("torch", dtype=torch.float64), BATCH)


def of_torch_geometric(_: Path) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = []
    for sample in samples():
        x = torch.from_numpy(sample["x"])
        graphs.append(Data(x=x.repeat(3, 1), edge_index=edges, y=torch.from_numpy(sample["y"])[None]))
    return GraphLoader(graphs, BATCH)


def of_tensordict(_: Path) -> Any:
    from tensordict import TensorDict

    x, y = map(torch.from_numpy, rows())
    return DataLoader(TensorDict({"x": x, "y": y}, batch_size=[SIZE]), BATCH, collate_fn=as_it_is)


def as_it_is(batch: Any) -> Any:
    return batch


def of_torchdata(_: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(samples(), BATCH)


def of_nodes(_: Path) -> Any:
    from torchdata import nodes

    node = nodes.SamplerWrapper(range(SIZE))
    node = nodes.Mapper(node, samples().__getitem__)
    node = nodes.Mapper(nodes.Batcher(node, BATCH, drop_last=False), torch.utils.data.default_collate)
    return nodes.Loader(node)


def of_monai(_: Path) -> Any:
    from monai.data import CacheDataset
    from monai.data import DataLoader as MonaiLoader
    from monai.transforms import EnsureTyped

    data = CacheDataset(samples(), EnsureTyped(("x", "y")), progress=False)
    return MonaiLoader(data, batch_size=BATCH)


def of_torchio(_: Path, *, queue: bool = False) -> Any:
    import torchio

    subjects = []
    for sample in samples():
        x = torch.from_numpy(sample["x"]).reshape(1, FEATURES, 1, 1)
        y = torch.from_numpy(sample["y"])
        subjects.append(torchio.Subject(x=torchio.ScalarImage(tensor=x), y=y))
    data: Any = torchio.SubjectsDataset(subjects)
    if queue:
        data = torchio.Queue(
            data,
            max_length=2 * BATCH,
            samples_per_volume=1,
            sampler=torchio.UniformSampler((FEATURES, 1, 1)),
            shuffle_subjects=False,
            shuffle_patches=False,
            num_workers=0,
        )
    return torchio.SubjectsLoader(data, batch_size=BATCH, num_workers=0)


def of_grain(_: Path) -> Any:
    import grain

    return grain.MapDataset.source(samples()).batch(BATCH).to_iter_dataset()


def of_mosaicml(folder: Path) -> Any:
    import streaming

    stored = folder / "mosaicml"
    if not stored.exists():
        with streaming.MDSWriter(out=str(stored), columns={"x": "ndarray", "y": "ndarray"}) as writer:
            for sample in samples():
                writer.write(sample)
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=str(stored), batch_size=BATCH, shuffle=True, shuffle_seed=3)
    return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=2)


LIBRARIES: Mapping[str, tuple[str, Callable[[Path], Any]]] = {  # package and loader
    "webdataset": ("webdataset", of_webdataset),
    "litdata": ("litdata", of_litdata),
    "datasets": ("datasets", of_datasets),
    "datasets, streaming": ("datasets", partial(of_datasets, streams=True)),
    "torch_geometric": ("torch_geometric", of_torch_geometric),
    "tensordict": ("tensordict", of_tensordict),
    "torchdata, stateful": ("torchdata", of_torchdata),
    "torchdata.nodes": ("torchdata", of_nodes),
    "MONAI": ("monai", of_monai),
    "torchio": ("torchio", of_torchio),
    "torchio, queue": ("torchio", partial(of_torchio, queue=True)),
    "grain": ("grain", of_grain),
    "mosaicml-streaming": ("mosaicml-streaming", of_mosaicml),
}


# --- the training ------------------------------------------------------------------------------


def parts(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a batch, whatever library made it."""
    if isinstance(batch, (list, tuple)):
        x, y = batch
    elif hasattr(batch, "num_graphs"):
        x, y = batch.x.reshape(-1, 3, FEATURES).mean(1), batch.y
    else:
        x, y = batch["x"], batch["y"]
    if isinstance(x, dict):  # an image of torchio
        x = x["data"].reshape(-1, FEATURES)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    return x.double().as_subclass(torch.Tensor), y.double().as_subclass(torch.Tensor).reshape(len(x), 1)


class Regression(pl.LightningModule):
    """A small network; it may run out of memory once, and counts the samples of its passes."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
        self.net = torch.nn.Sequential(*layers).double()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = parts(batch)
        if self.fails and self.trainer.global_step == FAILS_AT:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SaveAt(pl.Callback):
    """Saves a checkpoint after some steps, and stops."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVES_AT:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@dataclass(frozen=True)
class Way:
    """A way to run a training: arguments of the callback, none for stock Lightning."""

    arguments: Mapping[str, Any] | None
    fails: bool = False
    resumes: bool = False


SETTINGS: Mapping[str, Way] = {
    "default": Way({}),
    "step": Way({"micro_batching": "step", "micro_batch_size": 3}),
    "error": Way({}, fails=True),
    "resume": Way({"micro_batch_size": 3}, resumes=True),
}


def trained(make: Callable[[Path], Any], folder: Path, way: Way) -> torch.Tensor:
    """Return the final weights."""

    def fit(module: Regression, *callbacks: Any, **settings: Any) -> None:
        ours = [] if way.arguments is None else [AutoAccumulate(cache=False, **way.arguments)]
        pl.seed_everything(7, verbose=False)
        trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=[*ours, *callbacks])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, make(folder), **settings)

    module = Regression(fails=way.fails)
    if way.resumes:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "mid.ckpt"
            fit(module, SaveAt(path))
            module = Regression()
            fit(module, ckpt_path=path, weights_only=False)
    else:
        fit(module)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def difference(make: Callable[[Path], Any], folder: Path, name: str) -> float:
    """Return the relative difference of the final weights to those of stock Lightning.

    A resumed run may give those of an uninterrupted one, or those of stock Lightning resumed, which reads the samples
    of most loaders again.
    """
    way = SETTINGS[name]
    ours = trained(make, folder, way)
    found = []
    for resumes in (False, True)[: 1 + way.resumes]:
        stock = trained(make, folder, Way(None, resumes=resumes))
        found.append(float((ours - stock).norm() / stock.norm()))
    return min(found)


def row(name: str, folder: Path) -> dict[str, Any]:
    package, make = LIBRARIES[name]
    try:
        found = version(package)
    except PackageNotFoundError:
        return {"library": name, "version": None, "differences": {}}
    differences: dict[str, Any] = {}
    for way in WAYS:
        try:
            differences[way] = difference(make, folder, way)
        except Exception as error:
            traceback.print_exc()
            differences[way] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return {"library": name, "version": found, "differences": differences}


def cells(record: Mapping[str, Any]) -> Iterator[str]:
    for way in WAYS:
        value = record["differences"].get(way)
        if value is None:
            yield "–"
        elif isinstance(value, str):
            yield value.partition(":")[0]
        else:
            yield "same" if value <= MOST else f"{value:.0e}"


def text(record: Record) -> str:
    table = [(each["library"], each["version"] or "not installed", *cells(each)) for each in record["rows"]]
    return shown(
        ("library", "version"),
        WAYS,
        table,
        f"Final weights beside stock Lightning's after {EPOCHS} epochs of {SIZE} samples in batches of {BATCH}: the "
        f"same (a relative difference of at most {MOST:.0e}), or how far off. AutoAccumulate(); in the step, in "
        "pieces of 3 samples; after an out-of-memory error in the third step; resumed in mid-epoch (as if never "
        "stopped, or as stock Lightning resumes).",
    )


def write_row(name: str, folder: Path) -> None:
    (folder / "row.json").write_text(json.dumps(row(name, folder)))


def row_apart(name: str) -> dict[str, Any]:
    """A row, measured in a process of its own: some libraries set how the whole program starts processes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        forked(partial(write_row, name, folder), folder / "output.txt")
        found: dict[str, Any] = json.loads((folder / "row.json").read_text())
    print(found, flush=True)
    return found


def measure(only: tuple[str, ...] = tuple(LIBRARIES)) -> dict[str, Any]:
    found = [row_apart(each) for each in only]
    wrong = [
        f"{each['library']}, {way}"
        for each in found
        for way, value in each["differences"].items()
        if isinstance(value, str) or value > MOST
    ]
    return {"rows": found, "missed": wrong}


main = benchmark("data_libraries", __doc__, measure, text, quick={"only": ("torchdata, stateful",)})

if __name__ == "__main__":
    raise SystemExit(main())
