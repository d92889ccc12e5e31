"""Real programs: what each verdict is at the start, at a later moment and after an error, and that cuts are right.

The oracle is the same module and loader in a Trainer without the callback, each batch in one pass.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, IterableDataset, default_collate
from true_support import (
    FEATURES,
    LOADER,
    OOM,
    ROUNDING,
    STEP,
    Case,
    Memory,
    Sharpness,
    Task,
    Way,
    cut_rightly,
    each,
    error,
    network,
    of_pairs,
    one_pass,
    pairs,
    refused,
    run,
    told,
    train,
)

from lightning_ga import AutoAccumulate
from lightning_ga.plan.item_counters import TargetTokens

each_cut = each("loader", "step")
each_oom = each("oom", "oom in step mode")
each_way = each("loader", "step", "oom", "oom in step mode")

# --- programs whose micro-batches have another gradient than the batch -----------------------------


def normalized() -> Task:
    norm = nn.BatchNorm1d(FEATURES).double()
    return Task(lambda task, batch: task.regression(task.norm(batch[0]), batch[1]), norm=norm)


def contrastive(task: Task, batch: Any) -> Tensor:
    views = torch.stack([task.predict(batch[0]), task.predict(batch[0] + batch[1])])[:, :, 0]
    return cross_entropy(torch.outer(*views), torch.arange(len(views[0])))


def summed(task: Task, batch: Any) -> Tensor:
    return 0.01 * mse_loss(task.predict(batch[0]), batch[1], reduction="sum")


def class_weighted(task: Task, batch: Any) -> Tensor:
    classes = (batch[0][:, 0] * 10).long() % 3
    return cross_entropy(task.predict(batch[0]), classes, torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64))


def queued() -> Task:
    """The loss looks at a queue of earlier samples, which the step fills."""

    def loss(task: Task, batch: Any) -> Tensor:
        predicted = task.predict(batch[0])
        value = mse_loss(predicted, batch[1]) + (predicted @ task.queue.T).logsumexp(1).mean()
        task.queue = torch.cat([task.queue[len(predicted) :], predicted.detach()])
        return value

    return Task(loss, queue=torch.linspace(-1, 1, 24, dtype=torch.float64).view(24, 1))


def taught() -> Task:
    """A teacher that starts equal to its student, and follows it in the step by ``.data``."""

    def loss(task: Task, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = task.teacher(batch[0] + 0.3)
        value = mse_loss(task.predict(batch[0]), wanted) + mse_loss(task.net(batch[0]), batch[1])
        for old, new in zip(task.teacher.parameters(), task.net.parameters()):
            old.data = 0.9 * old.data + 0.1 * new.data
        return value

    return Task(loss, teacher=network().requires_grad_(False))


WORDS, LENGTH = 11, 9


def of_sentences() -> Any:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (48, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (48, 1), generator=generator)
    labels = words.where(torch.arange(LENGTH) < lengths, -100)
    return DataLoader([{"words": a, "labels": b} for a, b in zip(words, labels)], batch_size=8)


def language() -> Task:
    """A causal model: a mean over tokens, of which those with label -100 and the first of each are none."""

    def loss(task: Task, batch: Any) -> Tensor:
        logits = task.predict(batch["words"])[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Task(loss, net=nn.Sequential(nn.Embedding(WORDS, 7), nn.Tanh(), nn.Linear(7, WORDS)).double())


LANGUAGE = Case(language, of_sentences)

INEXACT = {
    "BatchNorm": ("batch_norm", Case(normalized), "BatchNorm layers .norm.*GroupNorm"),
    "a sum": ("sum", Case(lambda: Task(summed)), "divide it by the number of samples"),
    "in-batch negatives": ("coupled", Case(lambda: Task(contrastive)), "couples the samples.*whole="),
    "class weights": ("weighted", Case(lambda: Task(class_weighted, outputs=3)), "normalize= a function"),
    "tokens": ("weighted", LANGUAGE, r"normalize= .*TargetTokens\(\)"),
    "a queue": ("stateful", Case(queued), "changes queue"),
    "a teacher": ("stateful", Case(taught), r"changes teacher\."),
}


@pytest.mark.parametrize("name", INEXACT)
@each_cut
def test_the_cause_is_named_at_the_start(name: str, way: Way) -> None:
    cause, case, words = INEXACT[name]
    ours = told(case, way, cause, words)
    assert ours.callback.exactness.relative_error is None or ours.callback.exactness.relative_error > 1e-4


@pytest.mark.parametrize("name", ["BatchNorm", "in-batch negatives", "class weights", "a queue"])
@each_oom
def test_an_inexact_result_is_never_called_the_same(name: str, way: Way) -> None:
    """Nothing is said while a batch is one pass; the warning about memory names the verdict."""
    cause, case, words = INEXACT[name]
    ours = told(case, way, cause, f"Its gradient is not that of the window in one pass.*{words}")
    assert (ours.callback.oom_events, ours.callback.plan.factor, ours.told) == (1, 2, [])


@each_oom
def test_what_was_not_measured_is_not_called_the_same(way: Way) -> None:
    ours = run(Case(), way, arguments={"verify": False})
    assert error(ours, one_pass(Case())) <= ROUNDING
    assert "was not measured (verify=False)" in ours.ran_out[0]


# --- what begins later ------------------------------------------------------------------------------


def late(begins: Callable[[Task], bool]) -> Case:
    """The variance over the batch is a term of the loss from some moment on."""

    def loss(task: Task, batch: Any) -> Tensor:
        predicted = task.predict(batch[0])
        return mse_loss(predicted, batch[1]) + (predicted.var() if begins(task) else 0.0)

    return Case(lambda: Task(loss))


class Unfrozen(Task):
    """BatchNorm is frozen in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.norm.train(self.current_epoch > 0)

    def loss(self, batch: Any) -> Tensor:
        return self.regression(self.norm(batch[0]), batch[1])


LATE = {
    "by step": ("coupled", late(lambda task: task.global_step >= 5)),
    "BatchNorm": ("batch_norm", Case(lambda: Unfrozen(norm=nn.BatchNorm1d(FEATURES).double()))),
}


@pytest.mark.parametrize("name", LATE)
@each_cut
def test_what_begins_later_is_told_then(name: str, way: Way) -> None:
    """At one of the steps 1, 2, 4, 8, 16 and 32."""
    cause, case = LATE[name]
    told(case, way, cause, "Accumulation is not exact", max_epochs=6)


@each_cut
def test_what_begins_after_a_start_without_gradients_is_told_too(way: Way) -> None:
    """The start is told first: nothing could be measured there."""

    def loss(task: Task, batch: Any) -> Tensor:
        predicted = task.predict(batch[0])
        return (mse_loss(predicted, batch[1]) + predicted.mean().square()) * float(task.global_step >= 3)

    ours = run(Case(lambda: Task(loss)), way, max_epochs=6)
    assert ours.cause == "coupled"
    at_start, later = ours.told
    assert "its gradient is zero" in at_start
    assert "couples the samples" in later


@each_cut
def test_an_error_in_a_batch_that_couples_is_measured(way: Way) -> None:
    """The term begins with the fourth batch, which runs out of memory: no moment is near."""
    case = late(lambda task: task.global_step >= 3)
    ours = train(case.module(), case.loader(), way.callback(8, 8), memory=Memory(4))
    (event,) = ours.ran_out
    assert "Its gradient is not that of the window in one pass" in event
    assert ours.cause == "coupled"


# --- random numbers, parts that are left out, what cannot be measured ---------------------------------


def mixed(batch: Sequence[Tensor]) -> list[Tensor]:
    share, order = torch.rand(()).double(), torch.randperm(len(batch[0]))
    return [share * value + (1 - share) * value[order] for value in batch]


RANDOM = {
    "mixup in collate_fn": Case(loader=lambda: of_pairs(collate_fn=lambda samples: mixed(default_collate(samples)))),
    "mixup in the step": Case(lambda: Task(lambda task, batch: task.regression(*mixed(batch)))),
}


@pytest.mark.parametrize("name", RANDOM)
@each_cut
def test_random_numbers_are_no_error(name: str, way: Way) -> None:
    ours = run(RANDOM[name], way)
    assert ours.told == []
    assert ours.cause == "random" or (ours.cause == "exact" and way is STEP)  # pieces of one batch share its draw


class SkipsEmpty(Task):
    """Leaves out batches without a positive sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        positive = batch[1][:, 0] > 0
        return self.regression(batch[0][positive], batch[1][positive]) if positive.any() else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_micro_batches_without_a_loss_are_left_out_as_told() -> None:
    """The gradient is the mean over the others: here those of the first four samples of eight."""

    def data(batch: int, keeps: int) -> Any:
        numbered = enumerate(pairs(48))
        samples = [(x, y.abs() * (1 if number % 8 < 4 else -1)) for number, (x, y) in numbered if number % 8 < keeps]
        return DataLoader(samples, batch_size=batch)

    ours = train(SkipsEmpty(), data(8, 8), AutoAccumulate(micro_batch_size=4))
    assert error(ours, train(SkipsEmpty(), data(4, 4))) <= ROUNDING
    assert ["returned None for some micro-batches of a window" in text for text in ours.told].count(True) == 1


# --- programs that are cut exactly ---------------------------------------------------------------------


def without_broken(samples: Sequence[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


class Bag:
    """A type of the user's own, whose rows belong to samples of two rows."""

    def __init__(self, targets: Tensor, rows: Tensor) -> None:
        self.targets, self.rows = targets, rows  # ``split_batch`` gets sizes of the first

    def to(self, *_: Any, **__: Any) -> "Bag":
        return self

    def take(self, start: int, stop: int) -> Any:
        return type(self)(self.targets[start:stop], self.rows[2 * start : 2 * stop])

    @classmethod
    def collate(cls, samples: Sequence[Any]) -> Any:
        x, y = default_collate(list(samples))
        return cls(y, torch.stack([x, x.flip(1)], 1).flatten(0, 1))


def of_bag(task: Task, batch: Any) -> Tensor:
    return task.regression(batch.rows[::2] + batch.rows[1::2], batch.targets)


class SplitsBags(Task):
    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [batch.take(end - size, end) for size, end in zip(sizes, ends)]


class Iterated(IterableDataset[Any]):
    """A stream that a function makes anew for each epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def endless(size: int = 8) -> Any:
    """So many batches of one stream in each epoch, which goes on where the one before ended."""
    samples = iter([*pairs(200)])
    batches = iter(lambda: default_collate([*islice(samples, size)]), None)
    return Iterated(lambda: islice(batches, 4))


def ready(make: Callable[..., Any], *sizes: int) -> Callable[[], Any]:
    """Ready-made batches."""

    def loader() -> Any:
        x, y = default_collate(pairs(sum(sizes)))
        return DataLoader(
            Iterated(lambda: iter([*map(make, x.split(list(sizes)), y.split(list(sizes)))])), batch_size=None
        )

    return loader


def of_numbers(task: Task, batch: Any) -> Tensor:
    return (task.predict(batch.reshape(-1, 1)) - 1).square().mean()


def collated(collate: Any, loss: Any = None, samples: Any = pairs, module: Any = Task) -> Case:
    return Case(lambda: module(loss), lambda: DataLoader(samples(24), batch_size=8, collate_fn=collate))


class Optimized(Task):
    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


EXACT: dict[str, tuple[Case, str]] = {
    "broken samples": (
        collated(
            without_broken, samples=lambda n: [None if k in (3, 9, 20) else pair for k, pair in enumerate(pairs(n))]
        ),
        "",
    ),
    "split_batch": (collated(Bag.collate, of_bag, module=SplitsBags), ""),
    "ready-made tensors": (
        Case(lambda: Task(of_numbers, inputs=1), ready(lambda x, y: y[:, 0], 8, 5, 8, 6)),
        "cut in the step: batch_size=None",
    ),
    "an endless stream": (
        Case(loader=lambda: DataLoader(endless(), batch_size=None)),
        "cut in the step: batch_size=None",
    ),
    "SAM": (Case(lambda: Optimized(make=Sharpness)), "cut in the step: Sharpness evaluates"),
}
"""Programs and what the plan says of where they are cut."""


@pytest.mark.parametrize("name", EXACT)
@each_way
def test_batches_are_cut_exactly(name: str, way: Way) -> None:
    """Without and with an error of memory."""
    case, where = EXACT[name]
    ours = cut_rightly(case, way, max_epochs=2)
    summary = ours.callback._fit.summary()
    assert where in summary or way.mode == "step"
    assert ("cut in the step" in summary) == (bool(where) or way.mode == "step")


@each_way
def test_a_mean_over_tokens_is_exact_with_its_counter(way: Way) -> None:
    cut_rightly(LANGUAGE, way, arguments={"normalize": TargetTokens(shift=True)})


# --- batches that cannot be cut -------------------------------------------------------------------------

OPAQUE = Case(lambda: Task(of_bag), ready(lambda x, y: Bag.collate([*zip(x, y)]), 8, 8, 8))


def test_batches_that_cannot_be_cut_run_whole_until_memory_runs_out() -> None:
    ours = train(OPAQUE.module(), OPAQUE.loader(), AutoAccumulate())
    assert (ours.told, ours.callback.exactness) == ([], None)
    assert torch.equal(ours.weights, one_pass(OPAQUE).weights)
    refused(OPAQUE, LOADER, "split_batch")
    refused(OPAQUE, OOM, "split_batch")


def test_a_batch_that_is_cut_because_it_is_larger_than_the_first_is_told() -> None:
    data = ready(lambda *pair: pair, 4, 8)
    assert "BatchNorm" in train(normalized(), data(), AutoAccumulate(micro_batch_size=4)).told[0]
    assert train(normalized(), data(), AutoAccumulate()).told == []


def test_lazy_modules_are_refused_with_a_way_out() -> None:
    lazy = Case(lambda: Task(net=nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.Linear(7, 1)).double()))
    refused(lazy, LOADER, "lazy module.*verify=False")
    assert run(lazy, LOADER, arguments={"verify": False}).gradients
