"""What is to befall a run, drawn at random: pure, so that a seed tells the same stories again."""

import random
from dataclasses import dataclass
from itertools import product

EFFECTIVE, SAMPLES, EPOCHS = 64, 200, 3
MODELS, MODES, RANKS = ("transformer", "convolutional"), ("loader", "step"), (1, 2)

FORWARD, LOSS, FIRST, LATER = "forward", "loss", "backward, first of a window", "backward, later"
TRANSFER, VALIDATION, UPDATE = "batch transfer", "validation", "optimizer step"
PLACES = (FORWARD, LOSS, FIRST, LATER, TRANSFER, VALIDATION)  # not the update: it is not run again
BETWEEN, WRITE, WRITTEN = "between micro-batches", "writing a checkpoint", "after a checkpoint"
MOMENTS = (BETWEEN, FORWARD, FIRST, LATER, VALIDATION, UPDATE, WRITE, WRITTEN)


@dataclass(frozen=True, slots=True)
class Blow:
    """Memory runs out, or the process is killed."""

    place: str
    rank: int
    visit: int
    operation: float


@dataclass(frozen=True, slots=True)
class Life:
    """One process, or one on each rank."""

    micro_batch: int
    budget: str
    save_every: int
    faults: tuple[Blow, ...]
    end: Blow | None


@dataclass(frozen=True, slots=True)
class Story:
    """One training, of several lives where it is killed."""

    model: str
    mode: str
    ranks: int
    lives: tuple[Life, ...]


CELLS = tuple(product(MODELS, MODES, RANKS))


def undisturbed(model: str) -> Story:
    """The training that all others of a model have to equal: one rank, large micro-batches, no fault."""
    return Story(model, "loader", 1, (Life(EFFECTIVE, "8GiB", 100, (), None),))


def draw(rng: random.Random, number: int) -> Story:
    """A story; all combinations of model, mode and ranks take turns."""
    model, mode, ranks = CELLS[number % len(CELLS)]
    kills = rng.randint(1, 3)
    lives = tuple(_life(rng, ranks, killed=life < kills) for life in range(kills + 1))
    return Story(model, mode, ranks, lives)


def _life(rng: random.Random, ranks: int, *, killed: bool) -> Life:
    places = [*rng.sample([FORWARD] * 2 + [LOSS] * 2 + [FIRST] * 2 + [LATER] * 2, 5), TRANSFER, VALIDATION, VALIDATION]
    faults = tuple(_blow(rng, place, ranks, latest=4 if place == VALIDATION else 6) for place in places)
    end = _blow(rng, rng.choice(MOMENTS), ranks, latest=6) if killed else None
    if end is not None and end.place in (WRITE, WRITTEN):
        end = Blow(end.place, 0, min(end.visit, 3), end.operation)  # rank 0 writes
    micro_batch = rng.choice((64, 48, 32, 24)) // ranks
    return Life(micro_batch, rng.choice(("8GiB", "8GiB", "9GiB")), rng.randint(1, 3), faults, end)


def _blow(rng: random.Random, place: str, ranks: int, *, latest: int) -> Blow:
    return Blow(place, rng.randrange(ranks), rng.randint(1, latest), rng.random())
