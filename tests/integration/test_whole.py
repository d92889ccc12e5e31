"""``whole=``: losses that compare the samples of a batch; the oracle is the same training on whole batches."""

import copy
import math
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from contrastive import Contrastive, MixesSamples, fit, plain_loop, ranks, samples, whole_batches, worst
from faults import Arm, Faults
from forks import forked

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.schedule import linear

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|number of training batches).*"),
    pytest.mark.loader_only(reason="a window is one batch, which the recipe's are not"),
]
WINDOW = 64


def whole(**settings: Any) -> AutoAccumulate:
    return AutoAccumulate(**{"effective_batch_size": WINDOW, "whole": ("encoder",), "cache": False, **settings})


def as_whole(
    callback: AutoAccumulate, *more: Any, joined: bool = False, kind: str = "", **settings: Any
) -> Contrastive:
    """Train; assert that the gradients are those of whole batches of a window."""
    module = Contrastive(kind, joined=joined)
    fit(module, callback, *more, **settings)
    oracle = whole_batches(Contrastive(kind, joined=joined), 200, WINDOW)
    assert worst(module.gradients, oracle) <= 1e-12
    return module


class Averaged(Contrastive):
    """Has a mean of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss


HALVED = "chunks of 32 .* in chunks of at most 16 samples, with the same res"


@pytest.mark.parametrize(
    ("model", "settings", "names", "chunk"),
    [
        ({}, {"micro_batch_size": 16}, "encoder in 4 chunks of 16", 16),
        ({}, {"micro_batch_size": 24}, "encoder in 3 chunks of 22", 22),
        ({"joined": True}, {"micro_batch_size": 16}, "encoder in 4 chunks of 16", 16),
        ({}, {"micro_batch_size": 16, "whole": ["encoder", "head"]}, "encoder and head in 4 chunks of 16", 16),
        ({}, {"micro_batch_size": 16, "whole": "auto"}, "encoder and head in 4 chunks of 16", 16),
        ({"kind": "mixes"}, {"micro_batch_size": 16, "whole": "auto"}, "encoder.net and head in 4 chunks of 16", 16),
        ({}, {}, "encoder in 1 chunk of 64", 64),
    ],
    ids=["chunks", "uneven", "joined views", "two", "auto", "auto within", "all fits"],
)
def test_gradients_are_those_of_the_whole_batch(model: Any, settings: Any, names: str, chunk: int) -> None:
    """Also in the last window, which holds 8 samples."""
    callback = whole(**settings)
    as_whole(callback, **model)
    assert (callback.plan.factor, callback.plan.chunk_size) == (1, chunk)
    assert str(callback.plan) == f"effective batch 64 in one loss, {names}"
    assert callback.exactness.cause == "exact"


@pytest.mark.parametrize("stream", [False, True])
def test_streams_and_recipes_that_accumulate_make_one_batch_of_a_window(stream: bool) -> None:
    callback = AutoAccumulate(whole="encoder", micro_batch_size=10)
    as_whole(callback, stream=stream, accumulate_grad_batches=2, batch_size=32)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("budget", [760, 780, 820, 960])
def test_the_probe_finds_the_chunk(joined: bool, budget: int) -> None:
    """In six steps; no smaller number of chunks fits, and none of the training runs out of memory."""
    callback = whole()
    as_whole(callback, joined=joined, memory=f"{budget}KiB")
    assert callback.oom_events == 0
    assert callback.probe.steps <= 6
    fewer = math.ceil(WINDOW / callback.plan.chunk_size) - 1
    if fewer:
        settings = {"micro_batch_size": math.ceil(WINDOW / fewer), "on_oom": "raise", "verify": False}
        with pytest.raises(torch.OutOfMemoryError):
            fit(Contrastive(joined=joined), whole(**settings), memory=f"{budget}KiB")


@pytest.mark.parametrize("settings", [{"micro_batch_size": 8}, {"memory": "900KiB"}], ids=["fixed", "probed"])
def test_windows_may_grow(settings: Any) -> None:
    """By a schedule of steps."""
    sizes, memory = {key: settings[key] for key in settings if key != "memory"}, settings.get("memory")
    module, callback = Contrastive(), whole(effective_batch_size=linear(16, 48, steps=4), **sizes)
    fit(module, callback, memory=memory)
    windows = samples(200).split([16, 24, 32, 40, 48, 40])
    assert worst(module.gradients, plain_loop(Contrastive(), list(windows))) <= 1e-12
    assert callback.oom_events == 0


def test_the_largest_window_of_a_schedule_is_tried_before_training() -> None:
    """The loss grows with the square of the window: what cannot fit in a later epoch costs no work."""
    schedule = {"effective_batch_size": {0: 32, 1: 200}}
    callback, late = whole(**schedule), Contrastive()
    fit(Contrastive(), callback, memory="1500KiB", max_epochs=2)
    assert callback.oom_events == 0
    with pytest.raises(UserError, match="smaller effective_batch_size, as whole= makes a window one pass"):
        fit(late, whole(**schedule), memory="1350KiB", max_epochs=2)
    assert not late.steps


@pytest.mark.parametrize("operation", [3, 20, 60, 110, 170])
def test_memory_that_runs_out_anywhere_halves_the_chunk(operation: int) -> None:
    """And the window runs again, with the same result; a mean of losses counts it as any other."""
    callback, faults = whole(micro_batch_size=32), Faults(operation)
    module = Averaged()
    with faults, pytest.warns(UserWarning, match=HALVED):
        fit(module, callback, Arm(faults))
    assert callback.oom_events == 1
    assert worst(module.gradients, whole_batches(Contrastive(), 200, WINDOW)) <= 1e-12
    assert module.mean.weight == len(module.gradients)


def test_a_window_that_no_chunk_makes_fit_ends_in_a_sentence() -> None:
    with pytest.raises(UserError, match="smaller effective_batch_size, as whole= makes a window one pass"):
        fit(Contrastive(), whole(effective_batch_size=256), memory="700KiB", batch_size=64)
    settings = {"effective_batch_size": 200, "micro_batch_size": 50, "verify": False}
    with pytest.raises(UserError, match="chunks of one sample .* the outputs for a whole window"):
        fit(Contrastive(), whole(**settings), memory="700KiB")


def resumed(callback: AutoAccumulate, path: Path, *more: Any, **settings: Any) -> None:
    """A second epoch is as the run would have gone on."""
    module = Contrastive()
    fit(module, callback, *more, ckpt_path=path, max_epochs=2, **settings)
    assert worst(module.gradients, whole_batches(Contrastive(), 200, WINDOW, epochs=2)[-4:]) <= 1e-12


def test_a_resume_goes_on_as_the_run_would_have(tmp_path: Path) -> None:
    """At the chunk that memory left, which the checkpoint knows."""
    faults, again = Faults(30), whole(micro_batch_size=32)
    with faults, pytest.warns(UserWarning, match="chunks of at most 16"):
        trainer = fit(Contrastive(), whole(micro_batch_size=32), Arm(faults))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed(again, tmp_path / "a.ckpt")
    assert again.plan.chunk_size == 16


class Copies(pl.Callback):
    """Copies the encoder while it trains, and moves the copy's weights."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.copy = copy.deepcopy(pl_module.encoder)
        with torch.no_grad():
            for parameter in self.copy.parameters():
                parameter.zero_()
        self.output = self.copy(samples(4))


def test_evaluation_and_copies_run_whole() -> None:
    """Validation to the bit as without the callback; a copy of an encoder has weights of its own."""
    module, copies, stock = Contrastive(), Copies(), Contrastive()
    fit(module, whole(micro_batch_size=10), copies)
    assert not copies.output.any()
    whole_batches(stock, 200, WINDOW)
    stock.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(module.validated[-1], stock.loss(samples(40)))
    assert "forward" not in vars(module.encoder)


def test_batch_norm_is_told_with_its_error() -> None:
    callback = whole(micro_batch_size=16)
    with pytest.warns(UserWarning, match="Accumulation is not exact for this model, relative error .*each chunk"):
        fit(Contrastive("batch norm"), callback)
    assert callback.exactness.cause == "batch_norm"
    assert callback.exactness.layers == ("1",)


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        ({}, {"whole": ("enc",)}, "whole= names 'enc', and Contrastive has no such submodule: it has encoder, head"),
        ({}, {"whole": 3}, 'whole=3 must be a tuple of names of submodules, such as ("encoder",), or "auto"'),
        ({}, {"effective_batch_size": None, "accumulate": 2}, "makes a window one batch, so its factor is 1, and accu"),
        ({}, {"micro_batching": "step"}, "needs a window of one batch, and the loader's own batches make it one of 4"),
        ({"kind": "mixes"}, {}, "depends on the others: name submodules that treat samples by themselves"),
    ],
)
def test_what_cannot_be_is_refused(model: Any, settings: Any, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        fit(Contrastive(**model), whole(**{"micro_batch_size": 16, **settings}))
    assert sentence in str(raised.value)


def test_without_whole_the_sentence_names_it() -> None:
    """With the submodules of this model, and the bytes of their outputs: two views of 8 + 8 numbers."""
    callback = AutoAccumulate(effective_batch_size=WINDOW, micro_batch_size=16)
    with pytest.warns(
        UserWarning, match=r"whole=\('encoder', 'head'\) runs them in the memory of a chunk and 256 B for"
    ):
        fit(Contrastive(), callback)
    assert callback.exactness.cause == "coupled"


class Odd(Contrastive):
    """A step of its own kind; what is done to the encoder is a function of it and the inputs."""

    def __init__(self, kind: str, *, kind_of: str = "") -> None:
        super().__init__(kind_of)
        self.odd = kind
        self.online = self.encoder
        if kind in ENCODERS:
            self.encoder = self.online = ENCODERS[kind]().double()

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.odd == "random views":
            inputs = inputs + 0.3 * torch.randn_like(inputs)
        if self.odd == "a part of it":
            return self.encoder.net(inputs).square().mean()
        return super().loss(inputs)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.odd == "two backward passes":
            torch.autograd.grad(loss, list(self.head.parameters()), retain_graph=True)
        return loss


class Counts(MixesSamples):
    """Multiplies by a number that falls with each call."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs) * 0.999**self.calls


class Follows(MixesSamples):
    """A mean that follows by ``data``, which keeps no version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.net(inputs)
        self.mean.data.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return outputs


class Overwrites(MixesSamples):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs.mul_(2))


ENCODERS = {"counts": Counts, "follows": Follows, "overwrites": Overwrites, "a part of it": MixesSamples}


@pytest.mark.parametrize(
    ("kind", "names", "sentence"),
    [
        ("counts", ("encoder",), "encoder.calls changes in the forward pass, which runs for each chunk"),
        ("follows", ("encoder",), "encoder.mean changes in the forward pass, which runs for each chunk"),
        ("overwrites", ("encoder",), "encoder changes its input in place"),
        (
            "a part of it",
            ("encoder",),
            "as training begins, does not call encoder (perhaps a method of it, such as forward_fea",
        ),
        ("", ("encoder", "encoder.0"), "encoder.0 lies inside encoder, which runs in chunks with it"),
    ],
)
def test_encoders_that_cannot_run_in_chunks_are_refused(kind: str, names: Any, sentence: str) -> None:
    """Before training, by name."""
    with pytest.raises(UserError) as raised:
        fit(Odd(kind), whole(micro_batch_size=16, whole=names))
    assert sentence in str(raised.value)


@pytest.mark.parametrize("kind", ["random views", "two backward passes", "a second name"])
def test_steps_that_may_run_in_chunks(kind: str) -> None:
    """Views at random, the graph used twice, a second name for an encoder."""
    name = ("online",) if kind == "a second name" else ("encoder",)
    module, callback, kept = Odd(kind), whole(micro_batch_size=4, whole=name), Odd(kind)
    for each, ours in ((module, callback), (kept, whole(micro_batch_size=WINDOW, whole=name))):
        torch.manual_seed(5)
        fit(each, ours)
    assert callback.exactness.cause == "exact"
    assert worst(module.gradients[:4], kept.gradients[:4]) <= 1e-12


def test_random_views_hide_no_encoder_that_mixes_samples() -> None:
    """What the step draws is the same in both passes of the check."""
    with pytest.raises(UserError, match="depends on the others"):
        fit(Odd("random views", kind_of="mixes"), whole(micro_batch_size=16))
    with pytest.warns(UserWarning, match="statistics of each chunk"):
        fit(Odd("random views", kind_of="batch norm"), whole(micro_batch_size=16))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_that_gather_the_batch_of_all_ranks(world_size: int, tmp_path: Path) -> None:
    """One backward pass a window; memory that runs out on one rank before it gathers costs a retry of this rank."""
    accumulate = {"effective_batch_size": 48, "micro_batch_size": 8, "whole": ("encoder",)}
    settings = {"ranks": world_size, "accumulate": accumulate, "fails_at": [[world_size - 1, 1]]}
    done = forked(ranks, settings, tmp_path, folder=tmp_path)
    assert done.code == 0, done.output[-8000:]
    records = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    windows = [torch.cat(parts) for parts in zip(*(record["inputs"] for record in records))]
    oracle = plain_loop(Contrastive(), windows)
    for rank, record in enumerate(records):
        assert record["cause"] == "exact"
        assert record["events"] == (rank == world_size - 1)
        assert worst(record["gradients"], oracle) <= 1e-12
    assert sorted(torch.cat(windows)[:, 0].tolist()) == sorted(samples(192)[:, 0].tolist())


class CountedRuns(pl.Callback):
    """How often the encoder's forward pass runs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.count = 0
        pl_module.encoder[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("joined", "budget", "kept"), [(True, 820, 0), (True, 900, 1), (False, 780, 2), (False, 900, 2)]
)
def test_throughput_keeps_the_chunks_that_fit(joined: bool, budget: int, kept: int) -> None:
    """Their forward passes are not run again."""
    runs = {}
    for objective in ("memory", "throughput"):
        callback, counted = whole(objective=objective), CountedRuns()
        as_whole(callback, counted, joined=joined, memory=f"{budget}KiB")
        assert callback.oom_events == 0
        runs[objective] = counted.count, callback.plan.chunk_size
    assert runs["throughput"] == (runs["memory"][0] - 4 * kept, runs["memory"][1])
    assert callback.plan.kept_chunks == callback.probe.kept_chunks == kept
    assert (f", {kept} of them not computed again" in str(callback.plan)) == bool(kept)
    assert callback.probe.steps <= 6 + 1 + kept


def test_throughput_refuses_no_budget_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step near the budget may run, and hardly a chunk of one sample fits."""
    monkeypatch.setattr("lightning_ga.probe.trials.ranks.is_sharded", lambda trainer: True)
    trained: dict[Any, list[int]] = {"memory": [], "throughput": []}
    for objective, budget in product(trained, (753, 757, 761)):
        with suppress(UserError):
            fit(Contrastive(joined=True), whole(objective=objective), memory=f"{budget}KiB")
            trained[objective].append(budget)
    assert trained["memory"] == trained["throughput"]
    assert 0 < len(trained["memory"]) < 3


def test_memory_that_runs_out_lets_no_chunk_be_kept(tmp_path: Path) -> None:
    """Nor does a resume; without an error it keeps them, as the cache knows too."""
    settings = {"objective": "throughput", "cache": True}
    for source in ("probe", "cache"):
        callback = whole(**settings)
        fit(Contrastive(), callback, memory="900KiB").save_checkpoint(tmp_path / "a.ckpt")
        assert (callback.probe.source, callback.plan.kept_chunks) == (source, 2)
    again, faults = whole(**settings), Faults(60)
    with faults, pytest.warns(UserWarning, match=HALVED):
        resumed(again, tmp_path / "a.ckpt", Arm(faults), memory="900KiB")
    assert (again.plan.chunk_size, again.plan.kept_chunks) == (16, 0)
