"""A training that is drawn at random, the course that it takes, and the same training as a plain loop of PyTorch.

A ``Recipe`` is what a user writes. A ``Course`` is how it is run: where batches are cut and into what, where memory
runs out, where it stops and goes on, and on how many ranks. The plain loop cuts the windows itself and takes each in
one pass. It knows nothing of the package, and it is the oracle of every course.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import ceil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from faults import Faults
from ranks import ddp, on_ranks
from reference import FEATURES, Samples, SaveAt, SizedStreamOf, StreamOf, permutation, quiet_trainer
from texts import LONGEST, WORDS, Texts, pad
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from lightning_ga import AutoAccumulate, ExactnessWarning, optimizer_steps
from lightning_ga.counters import TargetTokens
from lightning_ga.schedule import by_samples, by_step, geometric, linear

SEED, OWN_SEED, WHOLE, OF_VALIDATION = 7, 3, 1000, 11
COUPLINGS = ("variance", "sum", "largest", "contrast", "words")


@dataclass(frozen=True)
class Windows:
    """The callback's arguments, and the samples of a window that a plain loop reads off them.

    Args:
        count: Of (epoch, step, samples before).
        by_batches: Whether they are so many batches of each rank.
    """

    kind: str
    arguments: dict[str, Any]
    count: Callable[[int, int, int], int] = field(repr=False)
    by_batches: bool = False


@dataclass(frozen=True)
class Recipe:
    """What a user writes."""

    seed: int
    samples: int
    batch: int
    factor: int  # of the Trainer
    epochs: int
    data: str
    sizes: tuple[int, ...]  # of batches that are the user's own
    workers: int
    drop_last: bool
    limit: int | float | None
    texts: bool
    layout: str
    mean: str  # over samples or words
    optimizer: str
    schedule: str | None
    clip: float | None
    windows: Windows
    by_size: bool
    verify: bool
    measures: bool  # the module logs a metric
    transfers: bool  # the module moves its batches itself
    coupling: str | None
    interval: str = "step"  # of the schedule
    frequency: int = 1
    first_fit: int = 0  # epochs of a first fit, after which ``max_epochs`` is raised
    broken: tuple[int, ...] = ()  # samples that the dataset does not have, and the collate function leaves out


@dataclass(frozen=True)
class Course:
    """How a recipe is run; places where memory runs out are those of training, and calls count from one."""

    mode: str = "loader"
    micro: int = WHOLE
    asks: bool = False  # whether a limit of at most so many is looked for
    fails: tuple[tuple[str, int], ...] = ()  # (place, call)
    fits: int = WHOLE  # samples of validation
    stops: int = 0  # after so many steps; then it goes on, as ``then`` says
    then: "Course | None" = None
    ranks: int = 1
    checkpoint: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What is left of a training."""

    windows: list[list[int]]
    weights: Tensor
    rates: list[float]
    logged: list[dict[str, float]]
    seen: int  # samples, by a buffer of the module
    largest: int = 0  # micro-batch, in samples or, where sizes count, in words
    cause: str | None = None
    told: tuple[str, ...] = ()
    ran_out: tuple[str, ...] = ()


# --- drawing ------------------------------------------------------------------------------------


def draw(seed: int, *, coupling: bool = False) -> Recipe:
    """The recipe of a seed; with ``coupling`` one that no micro-batches can train exactly."""
    r = random.Random(seed)
    data = r.choice([*LOADERS, "shuffled", "shuffled", "in order"])
    is_mapped = data in MAPPED
    texts = r.random() < 0.5 and data not in READY
    batch, samples = r.choice([2, 3, 4, 6, 8, 16]), r.randint(9, 60)
    factor = r.choice([1, 1, 2, 3])
    windows = draw_windows(r, batch, factor, data)
    asked = windows.arguments.get("effective_batch_size", 1)
    can_sort = texts and is_mapped and isinstance(asked, int | dict) and "accumulate" not in windows.arguments
    limit = r.choice([None, None, None, 2, *([0.6] if data not in UNSIZED and samples >= 2 * batch else [])])
    if data in UNSIZED and samples < 2 * batch:  # stock Lightning skips a last window that comes before the limit
        limit = None
    optimizer = r.choice(["adam", "momentum", "sgd", *(["sparse"] if texts else [])])
    own = [batch] * samples if windows.arguments or limit else [r.randint(1, batch) for _ in range(samples)]
    recipe = Recipe(
        seed=seed,
        samples=samples,
        batch=batch,
        factor=1 if "accumulate" in windows.arguments else factor,
        epochs=r.choice([1, 2, 3]),
        data=data,
        sizes=tuple(own),
        workers=r.choice([0, 0, 0, 1, 2]) if is_mapped else r.choice([0, 0, 1]),
        drop_last=is_mapped and r.random() < 0.3,
        limit=limit,
        texts=texts,
        layout=r.choice([*LAYOUTS][: 3 if data in READY else None]),
        mean=r.choice(["samples", "words"]) if texts else "samples",
        optimizer=optimizer,
        schedule=r.choice([None, "one cycle", "step"]),
        clip=r.choice([None, None, 0.5]) if optimizer != "sparse" else None,
        windows=windows,
        by_size=can_sort and r.random() < 0.5,
        verify=coupling or r.random() < 0.4,
        measures=r.random() < 0.5,
        transfers=r.random() < 0.2,
        coupling=r.choice(COUPLINGS[: None if texts else 4]) if coupling else None,
    )
    return replace(recipe, **draw_counts(r, recipe))


def draw_counts(r: random.Random, recipe: Recipe) -> dict[str, Any]:
    """What is counted in batches, epochs and samples of the recipe: schedules, fits and samples that are broken.

    Frequencies by step count batches, so the windows are the recipe's.
    """
    is_plain = recipe.windows.kind == "recipe"
    schedule = "step" if is_plain and r.random() < 0.7 else recipe.schedule
    interval = r.choice(["step", "step", "epoch"]) if schedule == "step" else "step"
    counts = schedule == "step" and (interval == "epoch" or is_plain)
    frequency = r.choice([1, 2, 2, 3, 5])
    first_fit = r.randint(1, recipe.epochs - 1) if recipe.epochs > 1 and r.random() < 0.4 else 0
    broken = tuple(sorted(r.sample(range(recipe.samples), r.randint(1, 4)))) if r.random() < 0.3 else ()
    is_read = recipe.data in READY or recipe.by_size or recipe.coupling is not None
    return {
        "schedule": schedule,
        "interval": interval,
        "frequency": frequency if counts else 1,
        "first_fit": first_fit,
        "broken": () if is_read else broken,
    }


def draw_windows(r: random.Random, batch: int, factor: int, data: str) -> Windows:
    """Windows of the recipe, of a number of samples, by a schedule, or of a number of micro-batches.

    Batches that are cut in the step make whole windows.
    """
    is_whole = data not in MAPPED
    a, b = (batch * r.randint(1, 3) if is_whole else r.randint(2, 20) for _ in range(2))
    f, g, step, samples = r.randint(1, 3), r.randint(1, 3), r.randint(1, 5), r.randint(5, 60)

    def of(kind: str, asked: Any, count: Callable[[int, int, int], int]) -> Windows:
        return Windows(kind, {"effective_batch_size": asked}, count)

    def times(kind: str, asked: Any, count: Callable[[int, int, int], int]) -> Windows:
        return Windows(kind, {"accumulate": asked}, lambda e, k, n: batch * count(e, k, n), by_batches=True)

    found = [
        *[Windows("recipe", {}, lambda e, k, n: batch * factor, by_batches=True)] * 2,
        times("factor", f, lambda e, k, n: f),
        times("factor by epoch", {0: f, 1: g}, lambda e, k, n: g if e else f),
        times("factor by step", by_step({0: f, step: g}), lambda e, k, n: f if k < step else g),
        *[of("number", a, lambda e, k, n: a)] * 2,
        of("by epoch", {0: a, 1: b}, lambda e, k, n: b if e else a),
        of("by a function", lambda epoch: a if epoch else b, lambda e, k, n: a if e else b),
        of("by step", by_step({0: a, step: b}), lambda e, k, n: a if k < step else b),
        of("by samples", by_samples({0: a, samples: b}), lambda e, k, n: a if n < samples else b),
        of("geometric", geometric(a, 4 * a, steps=6), lambda e, k, n: min(4 * a, a * 2 ** (k // 3))),
    ]
    if not is_whole:
        ramp = linear(a, b, steps=step)
        found += [of("linear", ramp, lambda e, k, n: int(a + (b - a) * min(k, step) / step + 0.5))]
    return r.choice(found)


def covering(count: int, seeds: range, *, usable: Callable[[Recipe], bool]) -> list[int]:
    """So many seeds whose recipes have, together, as many pairs of traits as may be; the same each time.

    And one more for each kind of windows that none of these has in several epochs.
    """
    left = {seed: set(combinations(traits(recipe), 2)) for seed in seeds if usable(recipe := draw(seed))}
    chosen, seen = list[int](), set[Any]()
    for _ in range(count):
        best = max(left, key=lambda seed: len(left[seed] - seen))
        chosen, seen = [*chosen, best], seen | left.pop(best)
    for seed, pairs in left.items():
        lasting = {pair for pair in pairs if ("epochs", True) in pair and pair[0][0] == "windows"}
        if lasting - seen:
            chosen, seen = [*chosen, seed], seen | lasting
    return sorted(chosen)


def traits(recipe: Recipe) -> list[tuple[str, Any]]:
    """What two recipes may differ in."""
    names = "factor data workers drop_last limit texts layout mean optimizer schedule interval by_size verify measures"
    found = [(name, getattr(recipe, name)) for name in (*names.split(), "transfers")]
    found += [("fits", recipe.first_fit > 0), ("frequency", recipe.frequency > 1), ("broken", bool(recipe.broken))]
    return [*found, ("windows", recipe.windows.kind), ("epochs", recipe.epochs > 1)]


def draw_courses(recipe: Recipe, ends: list[int]) -> dict[str, Course]:
    """The courses that a recipe takes on one rank, by the steps after which its epochs end."""
    r = random.Random(f"courses of {recipe.seed}")
    lives = [replace(draw_life(r, recipe), fails=r.choice([(), draw_fails(r, recipe)])) for _ in range(2)]
    places = [each for each in ends[:-1] if each]
    if all(life.mode == "loader" for life in lives) and recipe.data in MAPPED:
        places = [*range(1, ends[-1])]  # other loaders are read from their start again, as by stock Lightning
    whole = recipe.batch if "accumulate" in recipe.windows.arguments else WHOLE
    courses = {
        "whole": Course(r.choice(modes_of(recipe)), whole, fits=r.choice([2, WHOLE])),
        "cut": draw_life(r, recipe),
        "out of memory": replace(draw_life(r, recipe), fails=draw_fails(r, recipe), fits=r.choice([1, 3])),
    }
    if places and not recipe.first_fit:
        courses["resumed"] = replace(lives[0], stops=r.choice(places), then=lives[1])
    return courses


def modes_of(recipe: Recipe) -> list[str]:
    """Where batches of a recipe may be cut with the same windows: in the step they are those of the loader."""
    is_in_turn = recipe.data in ("in order", "own class") or (recipe.data == "own sampler" and not recipe.workers)
    is_in_turn &= not recipe.by_size
    in_step = recipe.data not in MAPPED or (is_in_turn and recipe.windows.by_batches)
    return ["loader", "step"] if in_step else ["loader"]


def draw_life(r: random.Random, recipe: Recipe, ranks: int = 1) -> Course:
    """Where a life cuts its batches; a factor counts micro-batches, which are the recipe's batches then."""
    mode = r.choice(modes_of(recipe))
    checkpoint = random.Random(f"{recipe} {mode} {ranks}").choice([None, "auto", "net"])
    if "accumulate" in recipe.windows.arguments:
        return Course(mode, recipe.batch, ranks=ranks, checkpoint=checkpoint)
    asks = random.Random(f"asks {recipe} {mode} {ranks}").random() < 0.4
    return Course(mode, r.choice([1, 2, 3, 4, 5, 8, WHOLE]), asks, ranks=ranks, checkpoint=checkpoint)


def draw_fails(r: random.Random, recipe: Recipe) -> tuple[tuple[str, int], ...]:
    """Where memory runs out."""
    places = ["forward", "backward", "first layer", "operation", *(["transfer"] if recipe.transfers else [])]
    chosen = [r.choice(places) for _ in range(3)]
    return tuple((place, r.randint(1, 900 if place == "operation" else 25)) for place in chosen)


def draw_on_ranks(seed: int) -> Recipe:
    """A recipe whose samples ranks share out."""
    recipes = (draw(number) for number in (seed, *range(1000 * (seed + 1), 1000 * (seed + 2))))
    return replace(next(filter(is_shared, recipes)), workers=0, transfers=False)


def is_shared(recipe: Recipe) -> bool:
    """Whether ranks share its samples out, in the order of one rank."""
    return recipe.data == "shuffled" and recipe.limit is None and is_trained(recipe, 2) and is_trained(recipe, 3)


def draw_course_on_ranks(recipe: Recipe, steps: int) -> Course:
    """One life on two ranks or three, and another on as many or, where that changes no window, another number.

    ``drop_last`` leaves out batches, which a number of ranks makes.
    """
    r = random.Random(f"ranks of {recipe.seed}")
    count = recipe.windows.count
    least = 3 if recipe.windows.by_batches else min(count(e, k, n) for e in range(3) for k in (0, 9) for n in (0, 99))
    first = r.choice([2, 2, min(3, least)])  # each rank needs a sample of every window
    is_same = recipe.windows.by_batches or recipe.drop_last
    ranks = (first, first if is_same else r.choice([1, 2, min(3, least)]))
    lives = [replace(draw_life(r, recipe, n), fails=r.choice([(), draw_fails(r, recipe)])) for n in ranks]
    return (
        replace(lives[0], stops=r.randint(1, steps - 1), then=lives[1])
        if steps > 1 and not recipe.first_fit
        else lives[0]
    )


# --- data ---------------------------------------------------------------------------------------


class Fixed(DataLoader):
    """A subclass whose constructor takes nothing that a DataLoader's takes."""

    def __init__(self, data: Any, *, size: int, more: dict[str, Any]) -> None:
        super().__init__(data, batch_size=size, **more)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(OWN_SEED)


LOADERS: dict[str, Callable[[Any, Recipe, dict[str, Any]], Any]] = {
    "shuffled": lambda data, recipe, more: DataLoader(data, recipe.batch, True, **more),
    "in order": lambda data, recipe, more: DataLoader(data, batch_size=recipe.batch, **more),
    "own generator": lambda data, recipe, more: DataLoader(
        data, recipe.batch, shuffle=True, generator=generator(), **more
    ),
    "own sampler": lambda data, recipe, more: DataLoader(
        data, recipe.batch, sampler=DistributedSampler(data, 1, 0, seed=OWN_SEED), **more
    ),
    "own class": lambda data, recipe, more: Fixed(data, size=recipe.batch, more=more),
    "stream": lambda data, recipe, more: DataLoader(StreamOf(data), recipe.batch, **more),
    "sized stream": lambda data, recipe, more: DataLoader(SizedStreamOf(data), recipe.batch, **more),
    "own batches": lambda data, recipe, more: DataLoader(data, batch_sampler=own_batches(recipe), **more),
    "ready-made": lambda batches, *_: DataLoader(batches, batch_size=None),
    "iterable": lambda batches, *_: StreamOf(batches),
    "sized iterable": lambda batches, *_: SizedStreamOf(batches),
}
READY = ("ready-made", "iterable", "sized iterable")
WHOLE_BATCHES = (*READY, "own batches")
UNSIZED = ("stream", "iterable")
MAPPED = ("shuffled", "in order", "own generator", "own sampler", "own class")
SEEDS_OF_ORDERS = {"shuffled": SEED, "own generator": OWN_SEED, "own sampler": OWN_SEED}


@dataclass
class Item:
    """A batch that is a dataclass."""

    x: Tensor
    y: Tensor
    number: Tensor


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y, i: (x, y, i), lambda batch: batch),
    "dict": (lambda x, y, i: {"y": y, "x": x, "number": i}, lambda b: (b["x"], b["y"], b["number"])),
    "dataclass": (Item, lambda b: (b.x, b.y, b.number)),
    "nested, with what belongs to all": (
        lambda x, y, i: {"in": [x, {"names": [str(int(n)) for n in i]}], "scale": torch.ones(3), "out": (y, i)},
        lambda b: (b["in"][0] * b["scale"][0], *b["out"]),
    ),
    "samples in the second axis": (
        lambda x, y, i: {"x": x.T.contiguous(), "y": y.T.contiguous(), "number": i},
        lambda b: (b["x"].T, b["y"].T, b["number"]),
    ),
}
"""How a batch is made of inputs, targets and numbers, and how these are read off it."""


def dataset(recipe: Recipe, size: int) -> Any:
    return Texts(size) if recipe.texts else Samples(size)


class Broken(Dataset):
    """A dataset without some of its samples."""

    def __init__(self, data: Any, broken: tuple[int, ...]) -> None:
        self.data, self.broken = data, broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return None if index in self.broken else self.data[index]


def collate(recipe: Recipe, samples: Sequence[Any]) -> Any:
    """A batch of the samples that are there; one without samples, if none is."""
    found = [sample for sample in samples if sample is not None]
    some = found or [dataset(recipe, 1)[0]]
    if recipe.texts:
        return {name: part[: len(found)] for name, part in pad(some).items()}
    return LAYOUTS[recipe.layout][0](*[part[: len(found)] for part in default_collate(some)])


def parts_of(recipe: Recipe, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and numbers."""
    parts = (batch["words"], batch["labels"], batch["number"]) if recipe.texts else LAYOUTS[recipe.layout][1](batch)
    return tuple(parts)  # type: ignore[return-value]


def own_batches(recipe: Recipe) -> list[list[int]]:
    left, batches = list(range(recipe.samples)), []
    for size in recipe.sizes:
        batches, left = [*batches, left[:size]], left[size:]
    return [batch for batch in batches if batch]


def loader_of(recipe: Recipe) -> Any:
    """The training data, as the recipe gives them."""
    data = Broken(dataset(recipe, recipe.samples), recipe.broken)
    if recipe.data in READY:
        data = [collate(recipe, [data[index] for index in batch]) for batch in own_batches(recipe)]
    more: dict[str, Any] = {"collate_fn": lambda samples: collate(recipe, samples), "num_workers": recipe.workers}
    more |= {"persistent_workers": recipe.workers == 2}
    more |= {} if recipe.data in WHOLE_BATCHES else {"drop_last": recipe.drop_last}
    return LOADERS[recipe.data](data, recipe, more)


# --- the plain loop -----------------------------------------------------------------------------


def batches_of(recipe: Recipe, ranks: int = 1) -> int:
    """The batches of an epoch on each rank, as the user's own loader and the Trainer's limit have it."""
    share = ceil(recipe.samples / ranks)
    count = share // recipe.batch if recipe.drop_last else ceil(share / recipe.batch)
    if recipe.data in WHOLE_BATCHES:
        count = len(own_batches(recipe))
    if isinstance(recipe.limit, float):
        return int(count * recipe.limit)
    return count if recipe.limit is None else min(count, recipe.limit)


def windows_by_epoch(recipe: Recipe, ranks: int = 1, *, counts_broken: bool = True) -> list[list[list[int]]]:
    """The samples behind each optimizer step, epoch by epoch, also those that are broken.

    The loader counts these for schedules by samples, the step does not: it has never seen them.
    """
    epochs: list[list[list[int]]] = []
    step = seen = 0
    for epoch in range(recipe.epochs):
        left = list(range(recipe.samples))
        if recipe.data in SEEDS_OF_ORDERS:
            left = permutation(recipe.samples, SEEDS_OF_ORDERS[recipe.data], epoch)
        sizes = [recipe.batch * ranks] * batches_of(recipe, ranks)
        if recipe.data in WHOLE_BATCHES:
            sizes = [len(batch) for batch in own_batches(recipe)][: len(sizes)]
        left = left[: sum(sizes)]
        found: list[list[int]] = []
        while left:
            count = recipe.windows.count(epoch, step, seen) * (ranks if recipe.windows.by_batches else 1)
            if recipe.data in WHOLE_BATCHES and not recipe.windows.arguments:
                count = sum(sizes[len(found) * recipe.factor :][: recipe.factor])
            found.append(left[:count])
            counted = found[-1] if counts_broken else [index for index in found[-1] if index not in recipe.broken]
            step, seen, left = step + 1, seen + len(counted), left[count:]
        epochs.append(found)
    return epochs


def is_trained(recipe: Recipe, ranks: int = 1) -> bool:
    """Whether each epoch has windows, and each of these a sample: what would be refused is not drawn.

    The samples are unequal if sizes count.
    """
    epochs, lengths = windows_by_epoch(recipe, ranks), Texts(recipe.samples).lengths
    trained = {lengths[index] for windows in epochs for window in windows for index in window}
    is_read = recipe.data not in READY or recipe.sizes[:2] != (1, 1)  # where samples lie, in a batch of several
    asked = recipe.data in WHOLE_BATCHES and "effective_batch_size" in recipe.windows.arguments
    is_read &= not asked or recipe.samples >= recipe.batch  # the first batch says how many samples one has
    is_read &= not asked or recipe.schedule != "one cycle"  # how many steps there are is known only then
    is_read &= all(set(window) - set(recipe.broken) for windows in epochs for window in windows)
    is_read &= windows_by_epoch(recipe, ranks, counts_broken=False) == epochs  # the same in the loader and in the step
    return all(epochs) and is_read and not (recipe.by_size and len(trained) == 1)


def ends_of(recipe: Recipe) -> list[int]:
    """The steps after which epochs end."""
    counts = [len(windows) for windows in windows_by_epoch(recipe)]
    return [sum(counts[: epoch + 1]) for epoch in range(len(counts))]


def plain(recipe: Recipe, ranks: int = 1) -> Outcome:
    """Train in a plain loop, each window in one pass; each fit makes an optimizer and a schedule of its own."""
    data, net, epochs = dataset(recipe, recipe.samples), network(recipe), windows_by_epoch(recipe, ranks)
    epochs = [[[i for i in window if i not in recipe.broken] for window in windows] for windows in epochs]
    batches = batches_of(recipe, ranks)
    rates, logged = [], []
    for epoch, windows in enumerate(epochs):
        if epoch in (0, recipe.first_fit):
            optimizer = optimizer_of(recipe, net)
            until = recipe.first_fit if epoch < recipe.first_fit else recipe.epochs
            schedule = schedule_of(recipe, optimizer, sum(map(len, epochs[:until])))
        losses: list[tuple[float, int]] = []
        for number, window in enumerate(windows):
            batch = collate(recipe, [data[index] for index in window])
            optimizer.zero_grad()
            loss = loss_of(recipe, net, batch)
            loss.backward()
            if recipe.clip:
                nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            done = number + 1  # windows, or batches, of which the last window may have fewer
            if recipe.frequency > 1:
                done = min(done * recipe.factor, batches)
            if schedule is not None and recipe.interval == "step" and done % recipe.frequency == 0:
                schedule.step()
            losses.append((loss.item(), weight_of(recipe, batch)))
        if schedule is not None and recipe.interval == "epoch" and (epoch + 1) % recipe.frequency == 0:
            schedule.step()
        numbers = torch.tensor([float(index) for window in windows for index in window])
        with torch.no_grad():
            validated = loss_of(recipe, net, collate(recipe, list(map(dataset(recipe, 99).__getitem__, range(11)))))
        metric = {"square": float((numbers % 7).square().mean())} if recipe.measures else {}
        mean = sum(value * count for value, count in losses) / sum(count for _, count in losses)
        logged.append({"loss_epoch": mean, "numbers": float(numbers.sum()), "validated": float(validated), **metric})
    every = [sorted(window) for windows in epochs for window in windows]
    return Outcome(every, flat(net), rates, logged, sum(map(len, every)))


class Net(nn.Module):
    """Maps each vector, or each word, to a number."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.rest = first, nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: Machine.touch("first layer", inputs))
        return self.rest(hidden)[..., 0]


def network(recipe: Recipe) -> Net:
    """The same weights for each seed."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        sparse = recipe.optimizer == "sparse"
        return Net(nn.Embedding(WORDS, 6, sparse=sparse) if recipe.texts else nn.Linear(FEATURES, 6)).double()


def loss_of(recipe: Recipe, net: Net, batch: Any) -> Tensor:
    """The mean over samples or words, and what couples the samples."""
    inputs, targets, _ = parts_of(recipe, batch)
    predicted = net(inputs)
    if not len(inputs):
        return predicted.sum()
    losses = (predicted - targets.flatten()).square() if not recipe.texts else torch.empty(0)
    if recipe.texts:
        real = targets != -100
        errors = (predicted - targets / WORDS).square() * real
        if (recipe.mean == "words" and recipe.coupling is None) or recipe.coupling == "words":
            return errors.sum() / real.sum()
        losses, predicted = errors.sum(1) / real.sum(1), (predicted * real).sum(1)
    coupled: dict[str | None, Callable[[], Tensor]] = {
        "variance": lambda: losses.mean() + predicted.var(unbiased=False),
        "sum": losses.sum,
        "largest": losses.max,
        "contrast": lambda: losses.mean() - (predicted.tanh()[:, None] - predicted.tanh()).square().logsumexp(1).mean(),
    }
    return coupled.get(recipe.coupling, losses.mean)()


def weight_of(recipe: Recipe, batch: Any) -> int:
    """What the mean of a batch counts as in a mean over the epoch; it differs in batches of unequal sizes."""
    inputs, targets, numbers = parts_of(recipe, batch)
    return 10**7 * int((targets != -100).sum()) + len(numbers) if recipe.mean == "words" else len(numbers)


def optimizer_of(recipe: Recipe, net: nn.Module) -> Optimizer:
    if recipe.optimizer == "adam":
        return AdamW(net.parameters(), lr=1e-2)
    return SGD(net.parameters(), lr=5e-2, momentum=0.9 if recipe.optimizer == "momentum" else 0.0)


def schedule_of(recipe: Recipe, optimizer: Optimizer, steps: float | None) -> Any:
    if recipe.schedule == "one cycle" and recipe.data not in UNSIZED and steps:
        return lr_scheduler.OneCycleLR(optimizer, 5e-2, total_steps=int(steps))
    every = 3 if recipe.interval == "step" and recipe.frequency == 1 else 1
    return lr_scheduler.StepLR(optimizer, every, 0.7) if recipe.schedule else None


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# --- the Trainer --------------------------------------------------------------------------------


class Machine(pl.Callback):
    """What a training runs on, outside of its module: memory that runs out, and notes of what it saw."""

    in_use: "Machine | None" = None

    def __init__(self, course: Course, by_size: bool, ours: AutoAccumulate) -> None:
        self.course, self.by_size, self.ours = course, by_size, ours
        self.loop: Any = None  # of training, from a batch's start to its end, or to that of a batch that runs again
        self.results: Any = None  # of the loop, which has others in a measurement
        self.operations = Faults(*(call for place, call in course.fails if place == "operation"))
        self.calls: dict[str, int] = {}
        self.sizes, self.rates, self.windows = list[int](), list[float](), dict[int, set[int]]()
        self.logged: list[dict[str, float]] = []

    @staticmethod
    def touch(place: str, inputs: Tensor) -> None:
        """Use memory in training; one sample always fits, or as many words as the longest has where sizes count."""
        machine = Machine.in_use
        if machine is None or not machine.is_training:
            return
        machine.calls[place] = call = machine.calls.get(place, 0) + 1
        size, always = (inputs.numel(), LONGEST) if machine.by_size else (len(inputs), 1)
        if place == "forward":
            machine.sizes.append(size)
            machine.operations.armed = size > always
        # Batches are moved whole before the step cuts them: single samples make that no smaller.
        is_lost = place == "transfer" and machine.ours.plan.micro_batch_size == 1
        if size > always and not is_lost and (place, call) in machine.course.fails:
            machine.operations.armed = False
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 MiB, in {place}.")

    @property
    def is_training(self) -> bool:
        return self.loop is not None and self.loop._results is self.results

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.loop = trainer.fit_loop.epoch_loop
        self.results = self.loop._results

    def on_after_backward(self, *_: Any) -> None:
        self.operations.armed = False

    def on_train_batch_end(self, *_: Any) -> None:
        self.loop = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        found = trainer.callback_metrics
        names = ("loss_epoch", "numbers", "validated", "square")
        self.logged.append({name: float(found[name]) for name in names if name in found})


class Program(pl.LightningModule):
    """The recipe as a LightningModule that logs, counts its samples, and validates itself."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.net = recipe, network(recipe)
        self.square = torchmetrics.MeanSquaredError() if recipe.measures else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, _, numbers = parts_of(self.recipe, batch)
        Machine.touch("forward", inputs)
        loss = loss_of(self.recipe, self.net, batch)
        if loss.requires_grad:
            loss.register_hook(lambda _: Machine.touch("backward", inputs))
        self.seen += len(numbers)
        if self.square is not None:
            self.square(numbers % 7.0, torch.zeros(len(numbers)))
            self.log("square", self.square, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=weight_of(self.recipe, batch))
        self.log("numbers", float(numbers.sum()), on_step=False, on_epoch=True, reduce_fx="sum")
        if Machine.in_use is not None and Machine.in_use.is_training:
            Machine.in_use.windows.setdefault(self.global_step, set()).update(numbers.tolist())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if Machine.in_use is not None and len(parts_of(self.recipe, batch)[2]) > Machine.in_use.course.fits:
            raise torch.OutOfMemoryError("CUDA out of memory, in validation.")
        self.log("validated", loss_of(self.recipe, self.net, batch), batch_size=weight_of(self.recipe, batch))

    def val_dataloader(self) -> Any:
        samples = [dataset(self.recipe, 99)[index] for index in range(OF_VALIDATION)]
        return DataLoader(samples, 4, collate_fn=lambda some: collate(self.recipe, some))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.recipe, self.net)
        steps = optimizer_steps(self.trainer) if self.recipe.schedule == "one cycle" else None
        schedule = schedule_of(self.recipe, optimizer, steps)
        config = {"scheduler": schedule, "interval": self.recipe.interval, "frequency": self.recipe.frequency}
        return [optimizer], [config] if schedule is not None else []


class Moving(Program):
    """Moves its batches to the device itself, where memory may run out."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        Machine.touch("transfer", parts_of(self.recipe, batch)[0])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class StoppedError(Exception):
    """The run ends here."""


class StopAt(SaveAt):
    """Saves a checkpoint after a step, and ends the run as an error does."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if self.path.exists():
            raise StoppedError


def accumulate(recipe: Recipe, course: Course) -> AutoAccumulate:
    limit = {"max_micro_batch_size": course.micro} if course.asks else {"micro_batch_size": course.micro}
    arguments: dict[str, Any] = {"micro_batching": course.mode, "cache": False, **limit}
    arguments |= {"normalize": TargetTokens()} if recipe.mean == "words" and not recipe.coupling else {}
    arguments |= {"size_of": "auto"} if recipe.by_size else {}
    arguments["checkpoint"] = course.checkpoint
    return AutoAccumulate(**arguments, **recipe.windows.arguments, verify=recipe.verify)


def cause_of(ours: AutoAccumulate) -> str | None:
    """What has been measured of a fit."""
    return ours.exactness.cause if ours.exactness else None


def fit(recipe: Recipe, course: Course, path: Path, *, resumes: bool = False) -> Outcome:
    """One life of the recipe in a Trainer, from the checkpoint at the path or up to it."""
    module, ours = (Moving if recipe.transfers else Program)(recipe), accumulate(recipe, course)
    machine = Machine(course, recipe.by_size, ours)
    callbacks = [ours, machine, *([StopAt(path, course.stops)] if course.stops else [])]
    settings: dict[str, Any] = {"max_epochs": recipe.first_fit or recipe.epochs, "gradient_clip_val": recipe.clip}
    settings |= {"accumulate_grad_batches": recipe.factor, "limit_train_batches": recipe.limit}
    if course.ranks > 1:
        settings |= ddp()
    pl.seed_everything(99 if resumes else SEED, verbose=False)
    Machine.in_use = machine
    first_cause = None
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            pytest.raises(StoppedError) if course.stops else nullcontext(),
            machine.operations if machine.operations.at else nullcontext(),
        ):
            warnings.simplefilter("always")
            trainer = quiet_trainer(*callbacks, **settings)
            data = loader_of(recipe)
            trainer.fit(module, data, ckpt_path=path if resumes else None)
            if recipe.first_fit:
                first_cause = cause_of(ours)
                trainer.fit_loop.max_epochs = recipe.epochs
                trainer.fit(module, data)
    finally:
        Machine.in_use = None
    steps = range(min(machine.windows, default=0), max(machine.windows, default=-1) + 1)
    texts = [(str(each.message), issubclass(each.category, ExactnessWarning)) for each in caught]
    return Outcome(
        windows=[sorted(machine.windows.get(step, ())) for step in steps],
        weights=flat(module.net),
        rates=machine.rates,
        logged=machine.logged,
        seen=int(module.seen),
        largest=max(machine.sizes, default=0),
        cause=cause_of(ours) or first_cause,  # a fit that cuts nothing measures nothing
        told=tuple(text for text, is_told in texts if is_told and "The effective batch of" not in text),
        ran_out=tuple(text for text, _ in texts if "Memory ran out in training" in text),
    )


def train_course(recipe: Recipe, course: Course, folder: Path) -> Outcome:
    """All lives of a course on one rank, as one training."""
    first = fit(recipe, course, folder / "stopped.ckpt")
    if course.then is None:
        return first
    return joined(first, fit(recipe, course.then, folder / "stopped.ckpt", resumes=True))


def joined(first: Outcome, then: Outcome) -> Outcome:
    """Two lives as one."""
    windows, rates = first.windows + then.windows, first.rates + then.rates
    cause = then.cause or first.cause  # a life that cuts nothing measures nothing
    return replace(then, windows=windows, rates=rates, logged=[], ran_out=first.ran_out + then.ran_out, cause=cause)


def train_on_ranks(recipe: Recipe, course: Course, folder: Path) -> list[Outcome]:
    """All lives of a course, each on its ranks; what each rank has in the end, with the windows of all."""
    first = live_on_ranks(recipe, course, folder, resumes=False)
    if course.then is None:
        return first
    return [joined(first[0], then) for then in live_on_ranks(recipe, course.then, folder, resumes=True)]


def live_on_ranks(recipe: Recipe, course: Course, folder: Path, *, resumes: bool) -> list[Outcome]:
    place, path = folder / ("then" if resumes else "first"), folder / "stopped.ckpt"
    outcomes = on_ranks(live, place, recipe.seed, course, path, resumes, ranks=course.ranks)
    windows = [sorted({*chain.from_iterable(parts)}) for parts in zip(*(each.windows for each in outcomes))]
    return [replace(each, windows=windows, logged=[]) for each in outcomes]


def live(seed: int, course: Course, path: Path, resumes: bool) -> Outcome:
    """One life on this rank."""
    return fit(draw_on_ranks(seed), course, path, resumes=resumes)
