"""Where the samples of a batch lie is read and not guessed: batches of many shapes are cut rightly, or refused."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from reference import quiet_trainer
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from true_support import (
    FEATURES,
    STEP,
    Case,
    Memory,
    Task,
    Way,
    by_turns,
    comes_from_memory,
    cut_rightly,
    each_cut_in_step,
    each_oom,
    each_way,
    error,
    one_pass,
    pairs,
    refused,
    run,
    train,
)

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.batch.pytree import register_splitter
from lightning_ga.schedule import by_samples

MODES = pytest.mark.parametrize("mode", ["loader", "step"])

# --- sequences ----------------------------------------------------------------------------------


def sequences(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of 2 to ``longest`` steps, one of which is that long, with a target each."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator)
    lengths[count // 2] = longest
    steps = [torch.randn(int(n), FEATURES, generator=generator, dtype=torch.float64) for n in lengths]
    return list(zip(steps, torch.randn(count, generator=generator, dtype=torch.float64)))


def time_first(samples: Sequence[Any], steps: int | None = None) -> dict[str, Tensor]:
    """``x: (time, batch, features)`` with lengths and targets, padded to the longest or to a number of steps."""
    x = pad_sequence([sequence for sequence, _ in samples])
    if steps is not None:
        x = torch.cat([x, x.new_zeros(steps - len(x), *x.shape[1:])])
    lengths = torch.tensor([len(sequence) for sequence, _ in samples])
    return {"x": x, "lengths": lengths, "y": torch.stack([target for _, target in samples])}


def at_last_step(task: Task, batch: Any) -> Tensor:
    """Takes the state after the last step of each sequence, by its place: wrong places raise no error."""
    x, lengths, y = batch["x"], batch["lengths"], batch["y"]
    states = torch.tanh(task.net[0](x)).cumsum(0)
    last = states[lengths - 1, torch.arange(len(lengths))]
    return mse_loss(task.net[2](task.used(last, len(y)))[:, 0], y)


def padded_to_longest(task: Task, batch: Any) -> Tensor:
    """Its mask is as long as the longest sequence of the batch, as in pytorch-forecasting."""
    x, lengths, y = batch["x"].transpose(0, 1), batch["lengths"], batch["y"]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    states = task.net[1](task.net[0](x)) * mask[:, :, None]
    return mse_loss(task.net[2](task.used(states.sum(1) / lengths[:, None], len(y)))[:, 0], y)


def of_sequences(loss: Any, longest: int, steps: int | None = None) -> Case:
    collate = lambda samples: time_first(samples, steps)  # noqa: E731
    return Case(lambda: Task(loss), lambda: DataLoader(sequences(24, longest), batch_size=8, collate_fn=collate))


SEQUENCES = {
    "time first": of_sequences(at_last_step, 12, 12),
    "as many steps as samples": of_sequences(at_last_step, 8, 8),
    "padded to the longest": of_sequences(at_last_step, 12),
    "pads to lengths.max()": of_sequences(padded_to_longest, 12),
}

# --- what belongs to all samples ----------------------------------------------------------------

SHARED = torch.linspace(0.5, 3, 10, dtype=torch.float64)


def with_shared(samples: Sequence[Any]) -> dict[str, Any]:
    x, y = default_collate(list(samples))
    kind = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return {"x": x, "y": y, "kind": kind, "shared": {"vector": SHARED, "matrix": SHARED.outer(SHARED)}}


def by_kind(task: Task, batch: Any) -> Tensor:
    """Each sample has the weight of its kind; ten kinds are known and few are met."""
    losses = (task.predict(batch["x"]) - batch["y"]).square()[:, 0]
    return (losses * batch["shared"]["vector"][batch["kind"]]).mean()


def of_ten(loss: Any, micro: int) -> Case:
    data = lambda: DataLoader(pairs(30, 10), batch_size=10, collate_fn=with_shared)  # noqa: E731
    return Case(lambda: Task(loss, inputs=10), data, 10, micro)


BELONGS_TO_ALL = {
    "weights of ten kinds": of_ten(by_kind, 5),
}

# --- batches that come ready-made ---------------------------------------------------------------


class Given(IterableDataset[Any]):
    """Ready-made batches, or samples."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def of_numbers(task: Task, batch: Any) -> Tensor:
    """A batch is one tensor, in no container or in one."""
    values = batch["loss"] if isinstance(batch, dict) else batch
    return (task.predict(values.reshape(-1, 1)) - 1).square().mean()


def numbers() -> Task:
    return Task(of_numbers, inputs=1)


def ready(make: Callable[..., Any], sizes: Sequence[int] = (8, 5, 8, 6), module: Any = numbers) -> Case:
    def loader() -> Any:
        x, y = default_collate(pairs(sum(sizes)))
        return DataLoader(Given([*map(make, x.split(list(sizes)), y.split(list(sizes)))]), batch_size=None)

    return Case(module, loader, max(sizes))


READY = {
    "(n,)": ready(lambda x, y: y[:, 0]),
    "{'loss': (n,)}": ready(lambda x, y: {"loss": y[:, 0]}),
    "[(n, features), (n, 1)] of one size": ready(lambda x, y: [x, y], (8, 8, 8), module=Task),
    "weights of ten kinds in batches of 10 and 8": ready(
        lambda x, y: with_shared(list(zip(x, y))), (10, 8, 10), lambda: Task(by_kind)
    ),
}


# --- samples that are more or fewer in the batch ------------------------------------------------


def crops(samples: Sequence[list[dict[str, Tensor]]]) -> Any:
    """MONAI's ``list_data_collate``: the dataset gives each volume as a list of crops."""
    return default_collate([crop for volume in samples for crop in volume])


def volumes(count: int) -> list[list[dict[str, Tensor]]]:
    images = [{"image": x, "label": y} for x, y in pairs(4 * count)]
    return [images[4 * n : 4 * n + 4] for n in range(count)]


def without_broken(samples: Sequence[Any]) -> Tensor:
    return torch.stack([sample for sample in samples if sample is not None])


def with_broken(count: int, *broken: int) -> list[Tensor | None]:
    return [None if index in broken else x for index, (x, _) in enumerate(pairs(count, 8))]


def segmentation() -> Task:
    return Task(lambda task, batch: task.regression(batch["image"], batch["label"]))


def autoencoder() -> Task:
    return Task(lambda task, batch: task.regression(batch, batch), inputs=8, outputs=8)


MORE_OR_FEWER = {
    "crops": Case(segmentation, lambda: DataLoader(volumes(48), batch_size=8, collate_fn=crops), 8, 2),
    "a broken sample dropped": Case(
        autoencoder, lambda: DataLoader(with_broken(24, 3), batch_size=8, collate_fn=without_broken), 8, 4
    ),
}

# --- graphs -------------------------------------------------------------------------------------


class Graph:
    """What ``torch_geometric.data.Data`` is, as far as it matters here."""

    def __init__(self, x: Tensor, edge_index: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.y = x, edge_index, y


class GraphBatch:
    """What ``torch_geometric.data.Batch`` is: nodes of all graphs in one tensor, and edges between them."""

    def __init__(self, x: Tensor, edge_index: Tensor, y: Tensor, ptr: Tensor) -> None:
        self.x, self.edge_index, self.y, self.ptr = x, edge_index, y, ptr
        self.batch = torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff())

    @classmethod
    def from_data_list(cls, graphs: Sequence[Graph]) -> "GraphBatch":
        ptr = torch.tensor([0, *accumulate(len(graph.x) for graph in graphs)])
        edges = torch.cat([graph.edge_index + start for graph, start in zip(graphs, ptr)], dim=1)
        return cls(torch.cat([graph.x for graph in graphs]), edges, torch.cat([graph.y for graph in graphs]), ptr)

    @property
    def num_graphs(self) -> int:
        return len(self.ptr) - 1

    def to_data_list(self) -> list[Graph]:
        spans = zip(self.ptr.tolist(), self.ptr.tolist()[1:])
        return [
            Graph(
                self.x[start:stop],
                self.edge_index[:, (self.edge_index[0] >= start) & (self.edge_index[0] < stop)] - start,
                self.y[number : number + 1],
            )
            for number, (start, stop) in enumerate(spans)
        ]

    def to(self, device: Any, **_: Any) -> "GraphBatch":
        return self

    def __eq__(self, other: object) -> bool:  # as a FeatureStore
        return self is other

    __hash__ = object.__hash__


def graphs(count: int) -> list[Graph]:
    """Rings of three to seven nodes; the numbers of nodes and of graphs may coincide."""
    found = []
    for number, (x, y) in enumerate(pairs(count, 7 * FEATURES)):
        nodes = 3 + number % 5
        around = torch.arange(nodes)
        found.append(Graph(x.view(7, FEATURES)[:nodes], torch.stack([around, around.roll(1)]), y))
    return found


def over_graphs(task: Task, batch: Any) -> Tensor:
    """One round of messages, the mean over the nodes of each graph, and the mean over graphs."""
    source, target = batch.edge_index
    states = task.net[1](task.net[0](batch.x + torch.zeros_like(batch.x).index_add(0, target, batch.x[source])))
    sums = states.new_zeros(batch.num_graphs, states.shape[1]).index_add(0, batch.batch, states)
    means = sums / batch.ptr.diff()[:, None]
    return mse_loss(task.net[2](task.used(means, batch.num_graphs))[:, 0], batch.y)


def of_graphs(batch: Any, module: Any = Task) -> Case:
    data = lambda: DataLoader(graphs(24), batch_size=8, collate_fn=batch.from_data_list)  # noqa: E731
    return Case(lambda: module(over_graphs), data)


def of_opaque() -> Case:
    """Ready-made batches of a type that nobody knows how to cut."""
    found = graphs(24)
    batches = [Opaque.from_data_list(found[start : start + 8]) for start in range(0, 24, 8)]
    return Case(lambda: Task(over_graphs), lambda: DataLoader(Given(batches), batch_size=None))


class Splittable(GraphBatch):
    """A type of the user's own, which it was told how to cut."""


class Opaque(GraphBatch):
    """One that nobody knows how to cut."""

    to_data_list = num_graphs_of = None  # type: ignore[assignment]

    @property
    def num_graphs(self) -> int:
        return len(self.ptr) - 1


def take_graphs(batch: Any, start: int, stop: int) -> Any:
    return Splittable.from_data_list(GraphBatch.to_data_list(batch)[start:stop])


register_splitter(Splittable, count=lambda batch: batch.num_graphs, take=take_graphs)


class Hooked(Task):
    """With ``split_batch`` for what is not known otherwise."""

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        each = iter(GraphBatch.to_data_list(batch))
        return [type(batch).from_data_list(list(islice(each, size))) for size in sizes]


GRAPHS = {
    "graphs": of_graphs(GraphBatch),
    "a registered type": of_graphs(Splittable),
    "split_batch": of_graphs(Opaque, Hooked),
}


MADE_ANEW = {"graphs that nobody can cut": of_graphs(Opaque)}
"""Their parts are collated from samples that are at hand."""


# --- several loaders ----------------------------------------------------------------------------


def of_several(task: Task, batch: Any) -> Tensor:
    """The sum of the losses of its loaders, each a mean."""

    def of_one(part: Any) -> Tensor:
        return (task.predict(part[0]) - (part[1] if len(part) > 1 else 1)).square().mean()

    parts = batch.values() if isinstance(batch, dict) else batch
    return sum((k + 1) * of_one(part) for k, part in enumerate(parts))


def one_tensor(count: int) -> TensorDataset:
    return TensorDataset(default_collate(pairs(count))[0])


def loaders(combine: Callable[..., Any], *sizes: int, data: Callable[[int], Any] = pairs) -> Case:
    made = lambda: combine(*(DataLoader(data(4 * size), batch_size=size) for size in sizes))  # noqa: E731
    return Case(lambda: Task(of_several), made)


def as_list(*found: Any) -> list[Any]:
    return list(found)


def as_dict(*found: Any) -> dict[str, Any]:
    return {f"loader {number}": loader for number, loader in enumerate(found)}


def combined(*found: Any) -> CombinedLoader:
    return CombinedLoader(list(found), "min_size")


COLLECTIONS = {"list": as_list, "dict": as_dict, "CombinedLoader": combined}
SEVERAL = {
    "list of pairs": loaders(as_list, 8, 8),
    "dict of one tensor": loaders(as_dict, 8, 8, data=one_tensor),
    "CombinedLoader of pairs": loaders(combined, 8, 8),
}


def fixmatch(task: Task, batch: Any) -> Tensor:
    """Labelled samples, and more without a label of which two views have to agree."""
    labelled, unlabelled = batch["labelled"], batch["unlabelled"]
    wanted = task.net(unlabelled["weak"]).detach()
    agree = mse_loss(task.net(unlabelled["strong"]), wanted)
    return task.regression(labelled["x"], labelled["y"]) + agree


def fixmatch_loaders(unlabelled: int = 24) -> dict[str, Any]:
    some = [{"x": x, "y": y} for x, y in pairs(32)]
    more = [{"weak": x, "strong": x + 0.1} for x, _ in pairs(4 * unlabelled)]
    return {"labelled": DataLoader(some, batch_size=8), "unlabelled": DataLoader(more, batch_size=unlabelled)}


def of_fixmatch(unlabelled: int) -> Case:
    """A micro-batch of 1000 leaves batches whole, however they count."""
    return Case(lambda: Task(fixmatch), lambda: fixmatch_loaders(unlabelled), 1000, 4)


UNEQUAL, COPRIME = {"of 8 and 24 in proportion": of_fixmatch(24)}, of_fixmatch(25)

# --- tests --------------------------------------------------------------------------------------

CASES = SEQUENCES | BELONGS_TO_ALL | READY | MORE_OR_FEWER | GRAPHS | MADE_ANEW | SEVERAL | UNEQUAL


@by_turns(CASES)
def test_the_samples_of_a_batch_are_cut_rightly(name: str, way: Way) -> None:
    cut_rightly(CASES[name], way)


def evaluated(case: Case, limit: int | None, *callbacks: Any) -> float:
    """The mean of the losses of all batches, in a validation that runs out of memory above some samples."""
    task = case.module()

    class Evaluated(type(task)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = self.loss(batch)
            self.log("loss", value, batch_size=self.counted)

        def used(self, hidden: Tensor, samples: int) -> Tensor:
            if limit is not None and samples > limit:
                raise torch.OutOfMemoryError("CUDA out of memory, in validation.")
            self.counted = samples
            return hidden

    (found,) = quiet_trainer(*callbacks).validate(Evaluated(task.own, net=task.net), case.loader(), verbose=False)
    return found["loss"]


@pytest.mark.filterwarnings("ignore:Memory ran out in validation")
@pytest.mark.parametrize("name", ["time first", "pads to lengths.max()", "(n,)", "crops", "graphs", "split_batch"])
def test_memory_that_runs_out_in_validation(name: str) -> None:
    """The same loss as of whole batches; a step that pads parts otherwise fails with a note."""
    case = CASES[name]
    limit = 16 if name == "crops" else case.batch // 2
    if name == "pads to lengths.max()":
        with pytest.raises(RuntimeError) as caught:
            evaluated(case, limit, AutoAccumulate())
        assert "ran a part of a batch" in str(caught.value.__notes__)
    else:
        assert evaluated(case, limit, AutoAccumulate()) == pytest.approx(evaluated(case, None), rel=1e-6)


@MODES
def test_a_limit_in_volumes_is_kept_to(mode: str) -> None:
    case, memory = MORE_OR_FEWER["crops"], Memory(above=16, place="forward")
    callback = AutoAccumulate(micro_batch_size=8, micro_batching=mode)
    ours = train(case.module(), case.loader(), callback, memory=memory)
    assert error(ours, one_pass(case)) <= 1e-12
    assert callback.oom_events == 1
    assert memory.sizes == [32] + 12 * [16]


@each_cut_in_step
def test_samples_of_which_few_have_another_number_of_rows_are_not_cut_wrongly(way: Way) -> None:
    """Those that are looked at have four each, joined to one tensor, and one later has two."""

    def joined(samples: Sequence[Any]) -> list[Tensor]:
        return [torch.cat(part) for part in zip(*samples)]

    rows = [(torch.stack([x] * n), y.expand(n, 1)) for (x, y), n in zip(pairs(36), [4] * 29 + [2] + [4] * 6)]
    case = Case(loader=lambda: DataLoader(rows, batch_size=12, collate_fn=joined), batch=12, micro=4)
    try:
        ours = run(case, way)
    except UserError as failure:
        assert "split_batch" in str(failure)  # noqa: PT017
    else:
        assert ours.cause != "exact" or error(ours, one_pass(case)) <= 1e-12


@pytest.mark.parametrize("broken", [(3, 4, 20), (0, 1, 2, 3, 4, 5, 6)])
@MODES
def test_a_window_weighs_the_samples_that_were_kept(broken: tuple[int, ...], mode: str) -> None:
    """Eight features and batches of eight: a batch of (7, 8) holds seven samples, and is no sequence."""

    def loader(batch: int) -> Any:
        return DataLoader(with_broken(32, *broken), batch_size=batch, collate_fn=without_broken)

    callback = AutoAccumulate(16, micro_batch_size=8, micro_batching=mode)
    ours = train(autoencoder(), loader(8), callback)
    assert error(ours, train(autoencoder(), loader(16))) <= 1e-12
    assert ours.told == []


def test_a_piece_that_fails_by_itself_is_told() -> None:
    """In ready-made batches, which nobody can collate anew; each has a sequence of twelve steps."""
    batches = [time_first(sequences(size, 12)) for size in (8, 6, 8)]
    with pytest.raises(RuntimeError) as caught:
        run(Case(lambda: Task(padded_to_longest), lambda: DataLoader(Given(batches), batch_size=None)), STEP)
    assert any("ran a part of a batch" in note and "split_batch" in note for note in caught.value.__notes__)


@each_oom
def test_a_type_that_nobody_can_cut_and_memory_that_runs_out(way: Way) -> None:
    failure = refused(of_opaque(), way, "memory", "Opaque", "split_batch")
    assert comes_from_memory(failure)


def test_a_type_that_nobody_can_cut_is_refused_at_the_start_in_step_mode() -> None:
    case, memory = of_opaque(), Memory()
    with pytest.raises(UserError, match="split_batch"):
        train(case.module(), case.loader(), STEP.callback(8, 3), memory=memory)
    assert memory.sizes == []


# --- several loaders, of one size or not --------------------------------------------------------


@pytest.mark.parametrize("name", SEVERAL)
@MODES
def test_a_batch_of_two_loaders_holds_the_samples_of_one(name: str, mode: str) -> None:
    case = SEVERAL[name]
    ours = train(case.module(), case.loader(), AutoAccumulate(16, micro_batch_size=4, micro_batching=mode))
    assert error(ours, one_pass(case, accumulate_grad_batches=2)) <= 1e-12
    assert ours.callback.plan.effective_batch_size == 16
    assert ours.callback.plan.chunks == ((4, 4, 4, 4),)
    assert max(ours.memory.sizes) == 4


@pytest.mark.parametrize("effective", [2, 64])
@pytest.mark.parametrize("combine", COLLECTIONS.values(), ids=COLLECTIONS.keys())
@MODES
def test_loaders_of_unequal_size_have_no_effective_batch(combine: Any, effective: int, mode: str) -> None:
    """Refused before the first batch, with both sizes."""
    memory = Memory()
    case = loaders(combine, 8, 24)
    with pytest.raises(UserError) as caught:
        train(case.module(), case.loader(), AutoAccumulate(effective, micro_batching=mode), memory=memory)
    assert all(word in str(caught.value) for word in ("effective_batch_size", "8", "24"))
    assert memory.sizes == []


@each_way
def test_loaders_without_a_common_proportion_are_not_cut(way: Way) -> None:
    failure = refused(COPRIME, way, "split_batch", "memory" if way.fails else "8 and 25")
    assert comes_from_memory(failure) == way.fails


@pytest.mark.parametrize("case", [of_opaque(), COPRIME], ids=["a type that nobody can cut", "unequal loaders"])
@MODES
def test_the_verdict_says_that_a_batch_cannot_be_cut(case: Case, mode: str) -> None:
    ours = train(case.module(), case.loader(), AutoAccumulate(micro_batch_size=1000, micro_batching=mode))
    assert ours.told == []
    assert torch.equal(ours.weights, one_pass(case).weights)
    assert ours.cause in ("uncuttable", "unmeasured")
    assert "split_batch" in str(ours.callback.exactness)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"effective_batch_size": 4}, "effective_batch_size=4 counts samples, and how many"),
        ({"accumulate": by_samples({0: 1, 8: 2})}, r"by_samples\(\{0: 1, 8: 2\}\) counts samples, and how many"),
    ],
)
def test_batches_that_cannot_be_separated_count_as_no_number_of_samples(asked: Any, message: str) -> None:
    """They are of one size, and as long as the longest in them, which may be the samples as well."""
    batches = [{"x": torch.zeros(4, length), "y": torch.zeros(4)} for length in (7, 9, 8)]

    def own(task: Any, batch: Any) -> Tensor:
        return (task.net[0].bias.mean() + batch["x"].mean() - batch["y"].mean()).square()

    with pytest.raises(UserError, match=f"{message}.* accumulate=… how many batches make a step"):
        quiet_trainer(AutoAccumulate(**asked)).fit(Task(own), DataLoader(batches, batch_size=None))
    trainer = quiet_trainer(AutoAccumulate(verify=False, cache=False), max_epochs=1)
    trainer.fit(Task(own), DataLoader(batches, batch_size=None))
    assert "each batch counts as one sample" in trainer.callbacks[0]._fit.told.summary()
