"""``whole=``: losses that compare the samples of a batch; the oracle is the same training on whole batches."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from faults import Arm, Faults
from ranks import ddp, on_ranks
from reference import StreamOf, quiet_trainer, worst_error
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.testing import limit_memory

FEATURES, WIDTH, WINDOW, SIZE = 16, 128, 64, 200


class Encoder(nn.Module):
    """A layer, and what is done with its outputs."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.use = nn.Linear(FEATURES, 8), use

    def forward(self, inputs: Tensor, *more: Any) -> Tensor:
        return self.use(self.net, inputs, *more)


def encoder(*norm: nn.Module) -> nn.Module:
    layers = [nn.Linear(FEATURES, WIDTH), *norm, nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)]
    return nn.Sequential(*layers)


class Contrastive(pl.LightningModule):
    """Two views of each sample through one encoder, ``joined`` or by turns; all ranks ``gather`` the outputs."""

    def __init__(self, make: Any = encoder, *, joined: bool = False, gathers: bool = False, given: Any = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = make(), nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.double()
        self.joined, self.gathers, self.given = joined, gathers, given
        self.kept, self.validated, self.inputs = list[np.ndarray](), list[Tensor](), list[Tensor]()

    @property
    def gradients(self) -> list[Tensor]:
        return [*map(torch.from_numpy, self.kept)]  # in memory that is no tensor's

    def loss(self, inputs: Tensor) -> Tensor:
        if self.joined:
            one, other = self.head(self.encoder(torch.cat([inputs, inputs.tanh()]))).chunk(2)
        else:
            one, other = (self.head(self.encoder(view, *self.given)) for view in (inputs, inputs.tanh()))
        if self.gathers and dist.is_initialized():
            one, other = (torch.cat(all_gather(each)) for each in (one, other))
        logits = self.temperature.exp() * normalize(one) @ normalize(other).T
        return cross_entropy(logits, torch.arange(len(logits)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inputs += [batch[0].clone()] if self.gathers else []
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch[0]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.kept.append(
            np.concatenate([p.grad.cpu().numpy().ravel() for p in self.parameters() if p.grad is not None])
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def samples(count: int) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain_loop(module: Contrastive, batches: Any) -> list[Tensor]:
    """The gradients of a plain loop over these batches."""
    optimizer = module.configure_optimizers()
    for part in batches:
        optimizer.zero_grad()
        module.loss(part).backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
    return module.gradients


def fit(
    module: pl.LightningModule,
    *callbacks: Any,
    count: int = SIZE,
    memory: str | None = None,
    stream: bool = False,
    batch_size: int = WINDOW,
    ckpt_path: Any = None,
    **settings: Any,
) -> pl.Trainer:
    """Train one epoch in order; a window is one batch of the loader's."""
    data = TensorDataset(samples(count))
    loader = DataLoader(StreamOf(data) if stream else data, batch_size=batch_size)
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 1, **settings})
    with limit_memory(memory) if memory else nullcontext():
        trainer.fit(module, loader, DataLoader(TensorDataset(samples(40)), batch_size=40), ckpt_path=ckpt_path)
    return trainer


def whole(**settings: Any) -> AutoAccumulate:
    return AutoAccumulate(**{"whole": ("encoder",), "cache": False, **settings})


def as_whole(callback: AutoAccumulate, model: dict[str, Any], **settings: Any) -> None:
    """Train; assert that the gradients are those of whole batches of a window."""
    module = Contrastive(**model)
    fit(module, callback, **settings)
    assert worst_error(module.gradients, plain_loop(Contrastive(**model), samples(SIZE).split(WINDOW))) <= 1e-12


@pytest.mark.parametrize(
    ("model", "settings", "names", "chunk"),
    [
        ({}, {"micro_batch_size": 24}, "encoder in 3 chunks of 22", 22),
        ({"joined": True}, {"micro_batch_size": 16}, "encoder in 4 chunks of 16", 16),
        ({}, {"micro_batch_size": 16, "whole": ["encoder", "head"]}, "encoder and head in 4 chunks of 16", 16),
        ({}, {}, "encoder in 1 chunk of 64", 64),
    ],
    ids=["uneven", "joined views", "two", "all fits"],
)
def test_gradients_are_those_of_the_whole_batch(model: Any, settings: Any, names: str, chunk: int) -> None:
    """Also in the last window, which holds 8 samples."""
    callback = whole(**settings)
    as_whole(callback, model)
    assert (callback.plan.factor, callback.plan.chunk_size) == (1, chunk)
    assert str(callback.plan) == f"effective batch 64 in one loss, {names}"
    assert callback.exactness.cause == "exact"


def scaled(net: Any, inputs: torch.Tensor, scales: Any) -> torch.Tensor:
    return sum(scale * (scale * net(inputs)).tanh() for scale in scales)


OF_NO_SAMPLE = {
    "a list, as long as the batch": [0.1 * k for k in range(1, WINDOW + 1)],
    "a tensor, as long as the batch": torch.linspace(0.1, 0.8, WINDOW, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", OF_NO_SAMPLE)
def test_what_belongs_to_no_sample_is_passed_on_whole(kind: str) -> None:
    """Also if it is as long as the batch by chance; of a stream, too."""
    model = {"make": partial(Encoder, scaled), "given": (OF_NO_SAMPLE[kind],)}
    as_whole(whole(micro_batch_size=10), model, stream=True)


@pytest.mark.parametrize(("joined", "budget"), [(False, 820), (True, 780)])
def test_the_probe_finds_the_chunk(joined: bool, budget: int) -> None:
    """In six steps; no smaller number of chunks fits, and none of the training runs out of memory."""
    callback = whole()
    as_whole(callback, {"joined": joined}, memory=f"{budget}KiB")
    assert callback.oom_events == 0
    assert callback.probe.steps <= 6
    fewer = math.ceil(WINDOW / callback.plan.chunk_size) - 1
    if fewer:
        settings = {"micro_batch_size": math.ceil(WINDOW / fewer), "on_oom": "raise", "verify": False}
        with pytest.raises(torch.OutOfMemoryError):
            fit(Contrastive(joined=joined), whole(**settings), memory=f"{budget}KiB")


class OfTwoLoaders(Contrastive):
    """Runs its encoder over batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"][0]) + self.loss(batch["b"][0])


def test_the_probe_of_several_loaders_runs_chunks_as_training_does() -> None:
    """Batches of 16 and 48 have as many chunks; the limit counts parts with a sample of one and three of the other."""
    loaders = {name: DataLoader(TensorDataset(samples(4 * size)), size) for name, size in (("a", 16), ("b", 48))}
    callback = whole()
    trainer = quiet_trainer(callback, max_epochs=1)
    with limit_memory("820KiB"):
        trainer.fit(OfTwoLoaders(), loaders, DataLoader(TensorDataset(samples(40)), batch_size=40))
    assert callback.plan.chunk_size < 48
    assert callback.oom_events == 0


class Averaged(Contrastive):
    """Has a mean of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss


@pytest.mark.parametrize("operation", [3, 170])
def test_memory_that_runs_out_anywhere_halves_the_chunk(operation: int, tmp_path: Path) -> None:
    """The window runs again, with the same result; a mean of losses counts it as any other; a resume knows it."""
    callback, again, faults = whole(micro_batch_size=32), whole(micro_batch_size=32), Faults(operation)
    module, resumed = Averaged(), Averaged()
    told = "Memory ran out in training with 32 samples .* at most 16 samples"
    with faults, pytest.warns(UserWarning, match=told):
        trainer = fit(module, callback, Arm(faults))
    assert callback.oom_events == 1
    assert module.mean.weight == len(module.gradients)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(resumed, again, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
    assert again.plan.chunk_size == 16
    oracle = plain_loop(Contrastive(), samples(SIZE).split(WINDOW) * 2)
    assert worst_error(module.gradients + resumed.gradients, oracle) <= 1e-12


@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
def test_a_window_that_no_chunk_makes_fit_ends_in_a_sentence() -> None:
    with pytest.raises(UserError, match="smaller effective_batch_size, as whole= makes a window one pass"):
        fit(Contrastive(), whole(), memory="700KiB", count=256, batch_size=256)
    with pytest.raises(UserError, match="chunks of one sample .* the outputs for a whole window"):
        fit(Contrastive(), whole(micro_batch_size=1, verify=False), memory="700KiB", batch_size=200)


def test_evaluation_and_copies_run_whole() -> None:
    """Validation to the bit as without the callback; a copy of an encoder has weights of its own."""
    module, stock, outputs = Contrastive(), Contrastive(), []

    def copies(*_: Any) -> None:
        twin = copy.deepcopy(module.encoder)
        for parameter in twin.parameters():
            parameter.data.zero_()
        outputs.append(twin(samples(4)).any())

    fit(module, whole(micro_batch_size=10), pl.callbacks.LambdaCallback(on_train_batch_end=copies))
    assert not any(outputs)
    assert len(outputs) == 4
    stock.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(module.validated[-1], stock.loss(samples(40)))
    assert "forward" not in vars(module.encoder)


def mixed(net: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What comes of a sample depends on the others."""
    return net(inputs) - net(inputs).mean(0)


def padded(net: Any, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """To the longest sequence of those that are given."""
    states = net(inputs)[:, None].expand(-1, 9, -1)
    packed = pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True)[0]


class Odd(Contrastive):
    """A step of its own kind."""

    def __init__(self, kind: str, make: Any = encoder) -> None:
        super().__init__(make)
        self.kind, self.online = kind, self.encoder

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.kind == "a part":
            return self.encoder.net(batch[0]).square().mean()
        if self.kind == "sequences":
            summed = self.encoder(batch[0], 2 + torch.arange(len(batch[0])) // 2 % 7).sum(1)
            return (summed @ summed.T).logsumexp(1).mean()
        loss = self.loss(batch[0] + 0.3 * torch.randn_like(batch[0]) if self.kind == "random views" else batch[0])
        if self.kind == "two backward passes":
            torch.autograd.grad(loss, list(self.head.parameters()), retain_graph=True)
        return loss


MIXES, CUT = partial(Contrastive, partial(Encoder, mixed)), {"micro_batch_size": 16}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no name": (Contrastive, {"whole": ("enc",)}, "'enc', and Contrastive has no such submodule: it has 'encoder'"),
    "windows of four batches": (
        *(Contrastive, {"effective_batch_size": 4 * WINDOW}),
        "needs a window of one batch, and 4 batches of the loader make one",
    ),
    "mixes samples": (MIXES, {}, "depends on the others: name submodules that treat samples by themselves"),
    "overwrites": (
        *(partial(Contrastive, partial(Encoder, lambda net, inputs: net(inputs.mul_(2)))), {}),
        "encoder cannot be computed again, because its forward pass writes to its arguments",
    ),
    "a part of it": (partial(Odd, "a part", partial(Encoder, mixed)), {}, "does not call encoder itself"),
    "one inside another": (
        *(Contrastive, {"whole": ("encoder", "encoder.0")}),
        "whole= names 'encoder' and 'encoder.0', which lies inside it",
    ),
    "pads to the longest": (partial(Odd, "sequences", partial(Encoder, padded)), {}, "pad them to the longest"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_in_chunks_is_refused_by_name(kind: str) -> None:
    """Before training."""
    module, arguments, sentence = REFUSED[kind]
    with pytest.raises(UserError) as raised:
        fit(module(), whole(**CUT, **arguments))
    assert sentence in str(raised.value)


def test_batch_norm_is_told_with_its_error() -> None:
    """Random views do not hide it."""
    make = partial(encoder, torch.nn.BatchNorm1d(128))
    callback = whole(**CUT)
    with pytest.warns(UserWarning, match="Accumulation is not exact for this model, relative error .*each chunk"):
        fit(Contrastive(make), callback)
    assert callback.exactness.cause == "batch_norm"
    assert callback.exactness.layers == ("1",)
    with pytest.warns(UserWarning, match="statistics of each chunk"):
        fit(Odd("random views", make), whole(**CUT))


@pytest.mark.parametrize("kind", ["random views", "two backward passes", "a second name"])
def test_steps_that_may_run_in_chunks(kind: str) -> None:
    """Views at random, the graph used twice, a second name for an encoder."""
    name, modules = ("online",) if kind == "a second name" else ("encoder",), []
    for size in (4, WINDOW):
        modules.append(Odd(kind))
        callback = whole(micro_batch_size=size, whole=name)
        torch.manual_seed(5)
        fit(modules[-1], callback)
        assert callback.exactness.cause == "exact"
    assert worst_error(*(module.gradients for module in modules)) <= 1e-12


def on_rank() -> dict[str, Any]:
    """What this rank records of a fit."""
    module, callback = Contrastive(gathers=True), whole(micro_batch_size=8)
    fit(module, callback, count=192, **ddp())
    return {"cause": callback.exactness.cause, "gradients": module.gradients, "inputs": module.inputs}


@pytest.mark.distributed
def test_losses_that_gather_the_batch_of_all_ranks(tmp_path: Path) -> None:
    """One backward pass a window: the loss compares the samples of all ranks."""
    records = on_ranks(on_rank, tmp_path)
    windows = [torch.cat(parts) for parts in zip(*(record["inputs"] for record in records))]
    oracle = plain_loop(Contrastive(), windows)
    for record in records:
        assert record["cause"] == "exact"
        assert worst_error(record["gradients"], oracle) <= 1e-12
    assert sorted(torch.cat(windows)[:, 0].tolist()) == sorted(samples(192)[:, 0].tolist())
