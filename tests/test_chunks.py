"""Modules that run in chunks: the oracle is the same step on the whole batch."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from batch_losses import LOSSES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_ga import UserError, in_chunks
from lightning_ga.memory.live_tensors import LiveTensorMeter

SAMPLES, FEATURES, WIDTH = 23, 6, 5


class Towers(nn.Module):
    """Two encoders, one of them for both views if they are shared."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, shared: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = self.tower(dropout)
        self.other = self.one if shared else self.tower(dropout)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.to(dtype)

    @staticmethod
    def tower(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH))

    def embed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        one = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        return self.one(one), self.other(one + 0.1)


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def error(ours: nn.Module, whole: nn.Module) -> float:
    return float((gradients(ours) - gradients(whole)).norm() / gradients(whole).norm())


def step(towers: Towers, loss: Callable[..., Tensor], dtype: torch.dtype, chunk: int | None = None, **how: Any) -> None:
    torch.manual_seed(3)
    if chunk is None:
        loss(*towers.embed(dtype), towers.temperature).backward()
        return
    with in_chunks(towers.one, chunk=chunk, **how), in_chunks(towers.other, chunk=chunk, **how):
        embedded = towers.embed(dtype)
    loss(*embedded, towers.temperature).backward()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_that_couple_the_batch_have_the_gradient_of_the_whole(loss, dtype, most):
    ours, whole = Towers(dtype), Towers(dtype)
    step(ours, loss, dtype, chunk=5)
    step(whole, loss, dtype)
    assert error(ours, whole) <= most


class Noisy(nn.Module):
    """Multiplies by random numbers of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(FEATURES, WIDTH, dtype=torch.float64), kind
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: Tensor) -> Tensor:
        shape = len(inputs), 1
        draw = {
            "torch": lambda: torch.rand(shape),
            "a generator": lambda: torch.rand(shape, generator=self.generator),
            "numpy": lambda: torch.from_numpy(np.random.rand(*shape)),
            "python": lambda: random.random(),
        }
        return self.net(inputs * draw[self.kind]()).relu()


def in_chunks_of(chunk: int, module: nn.Module, inputs: Tensor, is_recomputed: bool) -> Tensor:
    """Run a module over chunks that are recomputed, or over as many batches of their own, whose graphs are kept."""
    if is_recomputed:
        with in_chunks(module, chunk=chunk):
            return module(inputs)
    parts = math.ceil(len(inputs) / chunk)
    return torch.cat([module(part) for part in inputs.tensor_split(parts)])


@pytest.mark.parametrize("kind", ["torch", "a generator", "numpy", "python"])
def test_random_numbers_are_drawn_again(kind: str) -> None:
    """The gradient is that of chunks whose graphs are kept, with the same draws, and so are the numbers after it."""
    inputs, seen = torch.randn(SAMPLES, FEATURES, dtype=torch.float64), []
    for is_recomputed in (True, False):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        module = Noisy(kind)
        outputs = in_chunks_of(5, module, inputs, is_recomputed)
        (outputs @ outputs.T).square().mean().backward()
        seen.append((gradients(module), torch.rand(1), np.random.rand(), random.random()))
    (ours, *numbers), (kept, *others) = seen
    assert float((ours - kept).norm() / kept.norm()) <= 1e-15
    assert numbers == others


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_updates_its_statistics_once_for_each_chunk(momentum: float | None) -> None:
    """And not again when a chunk is recomputed."""
    layer, batch = nn.BatchNorm1d(FEATURES, momentum=momentum), torch.randn(12, FEATURES)
    with in_chunks(layer, chunk=4):
        layer(batch).square().sum().backward()
    other = nn.BatchNorm1d(FEATURES, momentum=momentum)
    for part in batch.split(4):
        other(part)
    assert layer.num_batches_tracked == 3
    assert torch.equal(layer.running_mean, other.running_mean)
    assert torch.equal(layer.running_var, other.running_var)
    assert layer.momentum == momentum


@dataclass
class Encoded:
    pooled: Tensor
    states: dict[str, Tensor]
    kind: str = "encoded"


class Encoder(nn.Linear):
    """Takes a mask by name and a table of positions that belongs to no sample."""

    def forward(self, inputs: Tensor, positions: Tensor, *, mask: Tensor, scale: float = 1.0) -> Encoded:
        states = super().forward(inputs + positions) * mask[..., None] * scale
        return Encoded(states.mean(1), {"states": states})


def test_structures_are_cut_and_joined() -> None:
    """Arguments by name and containers of outputs; what belongs to no sample is passed on whole."""
    encoder, inputs = Encoder(FEATURES, WIDTH), torch.randn(7, 3, FEATURES)
    given = {"positions": torch.randn(3, FEATURES), "mask": torch.ones(7, 3), "scale": 2.0}
    whole = encoder(inputs, **given)
    with in_chunks(encoder, chunk=2):
        ours = encoder(inputs, **given)
    assert ours.kind == whole.kind
    torch.testing.assert_close(ours.pooled, whole.pooled)
    torch.testing.assert_close(ours.states["states"], whole.states["states"])


class Head(nn.Module):
    """The logits of tokens and their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(FEATURES, 1000)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(hidden).transpose(1, 2), targets, reduction="none")


def test_a_head_runs_over_tokens_in_the_memory_of_a_few() -> None:
    """The logits of all tokens are never there at once."""
    hidden, targets = torch.randn(2, 64, FEATURES), torch.randint(1000, (2, 64))
    heads, peaks = (Head(), Head()), []
    heads[1].load_state_dict(heads[0].state_dict())
    for head, chunk in zip(heads, (64, 8)):
        with LiveTensorMeter() as live, in_chunks(head, chunk=chunk, dim=1):
            head(hidden, targets).mean().backward()
        peaks.append(live.peak_bytes)
    assert error(heads[1], heads[0]) <= 1e-6
    assert peaks[1] < peaks[0] / 4


class Queue(nn.Module):
    """Gathers what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, batch: Tensor) -> Tensor:
        self.seen.add_(batch.detach().sum(0))
        return batch * self.seen.clone()


def test_what_a_chunk_changes_is_changed_once_and_read_as_it_was() -> None:
    """The oracle runs both chunks as batches of their own."""
    found = []
    for is_recomputed in (False, True):
        module = Queue()
        batch = torch.linspace(-1, 1, 4 * FEATURES).view(4, FEATURES).requires_grad_()
        in_chunks_of(2, module, batch, is_recomputed).square().sum().backward()
        found.append((batch.grad, module.seen))
    for kept, recomputed in zip(*found):
        assert torch.equal(kept, recomputed)


class Decoder(nn.Module):
    """Takes its queries first, and counts its calls."""

    calls = 0

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        self.calls += 1
        return features @ queries.T


@pytest.mark.parametrize("queries", [2, 3, 6])
def test_a_parameter_among_the_arguments_is_no_batch(queries: int) -> None:
    """Whatever its length, also if it comes first."""
    decoder, parameter, features = Decoder(), nn.Parameter(torch.randn(queries, FEATURES)), torch.randn(6, FEATURES)
    with in_chunks(decoder, chunk=3):
        ours = decoder(parameter, features)
    assert decoder.calls == 2
    torch.testing.assert_close(ours, features @ parameter.T)


class LastState(nn.Module):
    """Returns the last state of each of the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, WIDTH, num_layers=2)

    def forward(self, sequences: PackedSequence) -> Tensor:
        return self.rnn(sequences)[1][-1]


@pytest.mark.parametrize("lengths", [(5, 4, 2, 2, 1), (2, 5, 1, 2, 4)])
def test_packed_sequences_are_cut_by_sequences(lengths: tuple[int, ...]) -> None:
    """Sorted by length or not."""
    module, sequences = LastState(), [torch.randn(length, FEATURES) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=lengths[0] == max(lengths))
    with in_chunks(module, chunk=2):
        ours = module(packed)
    torch.testing.assert_close(ours, module(packed))


class Mean(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return batch.mean()


class Biased(nn.Module):
    """Returns a parameter that is as long as a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(batch), self.linear.bias


class Numbered(nn.Module):
    def forward(self, number: int) -> int:
        return number


@pytest.mark.parametrize(
    ("module", "given", "sentence"),
    [
        (Mean(), torch.ones(4, FEATURES), r"returned a tensor of shape \(\) for a chunk of 2"),
        (Biased(), torch.ones(4, FEATURES), r"returned a tensor of shape \(2,\) for a chunk of 2"),
        (Numbered(), 3, "got no tensor with axis 0"),
        (nn.LSTM(FEATURES, 3, 2, batch_first=True), torch.ones(4, 5, FEATURES), "hidden states, whose samples lie"),
    ],
    ids=["mean", "parameter", "no tensor", "hidden states"],
)
def test_what_cannot_run_in_chunks_is_refused(module: nn.Module, given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence), in_chunks(module, chunk=2):
        module(given)
    assert "forward" not in vars(module), "it is as before"
