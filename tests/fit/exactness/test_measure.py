"""Each verdict, by the path that trains: tiny modules in a real Trainer, whole batches and parts of them."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from reference import fit, loader, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.batch.layout import LayoutError
from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat.patching import replaced
from lightning_ga.errors import UserError
from lightning_ga.fit.exactness.measure import SAMPLES, measure
from lightning_ga.loading.trial_batches import CutBatch
from lightning_ga.plan.exactness_verdicts import Exactness

SIZES = (4, 3)


def batch_of(samples: int = sum(SIZES), dtype: torch.dtype = torch.float64, **more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=generator, dtype=dtype)
    targets = torch.arange(samples) % 3
    return {"inputs": inputs, "targets": targets, "values": inputs.sum(1, keepdim=True).sin(), **more}


def cut(batch: dict[str, Tensor], first: int = SIZES[0]) -> CutBatch:
    """The batch whole, and its two parts as slices."""
    samples = len(batch["inputs"])
    parts = [{name: tensor[place] for name, tensor in batch.items()} for place in (slice(first), slice(first, None))]
    return CutBatch(batch, (parts[0], parts[1]), (first, samples - first))


class Module(pl.LightningModule):
    """Trains whatever a loss says."""

    def __init__(self, loss: Callable[[Any, dict[str, Tensor]], Tensor], *layers: nn.Module, **named: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Linear(6, 3)).double()
        self.loss = loss
        for name, value in named.items():
            setattr(self, name, value)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Measuring(pl.Callback):
    """Calls a function as training starts, when everything is set up, and ends training."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run, self.found = run, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        before = everything(trainer, pl_module)
        self.found = self.run(trainer)
        assert same(everything(trainer, pl_module), before), "it leaves no trace"
        trainer.fit_loop.epoch_loop.max_steps = 0


def everything(trainer: Any, module: Any) -> list[Any]:
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    versions = [parameter._version for parameter in module.parameters()]
    attributes = {name: str(value) for name, value in vars(module).items()}
    counters = str(trainer.fit_loop.epoch_loop.batch_progress), str(trainer.callback_metrics), trainer.global_step
    return [tensors, versions, attributes, counters, torch.get_rng_state(), trainer.optimizers[0].state_dict()["state"]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, dict)):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        return len(one) == len(other) and all(same(one[key], other[key]) for key in keys)
    return bool(one == other)


def in_training(module: Any, run: Callable[[Any], Any], **settings: Any) -> Any:
    callback = Measuring(run)
    loader = DataLoader([batch_of(1)] * 2, batch_size=None)
    quiet_trainer(callback, max_steps=1, **settings).fit(module, loader)
    return callback.found


def verdict_on(
    module: Any, batch: CutBatch | None = None, *, normalize: Any = None, in_step: bool = False, **settings: Any
) -> Exactness:
    found = cut(batch_of()) if batch is None else batch
    samples = sum(found.sizes)

    def run(trainer: Any) -> Any:
        more: dict[str, Any] = {"available": samples, "limit": samples, "in_step": in_step}
        return measure(trainer, lambda *_: found, lambda batch: batch, normalize, **more)[0]

    return in_training(module, run, **settings)


def cross_entropy(module: Any, batch: dict[str, Tensor], **settings: Any) -> Tensor:
    return functional.cross_entropy(module.net(batch["inputs"]), batch["targets"], **settings)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(
    ("precision", "dtype", "most"),
    [
        ("64-true", torch.float64, 1e-12),
        ("32-true", torch.float32, 1e-5),
        ("bf16-mixed", torch.float32, 1e-5),
        ("16-mixed", torch.float32, 1e-5),
        ("bf16-true", torch.bfloat16, 5e-2),
    ],
)
def test_every_precision_is_exact_up_to_its_rounding(
    precision: Any, dtype: torch.dtype, most: float, in_step: bool
) -> None:
    """A small model runs without autocast; weights of half precision have a tolerance of their own.

    A weight without a gradient has none in all passes.
    """
    scaled = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    settings = {"plugins": scaled} if precision == "16-mixed" else {"precision": precision}
    verdict = verdict_on(
        Module(cross_entropy, unused=nn.Linear(1, 1)).to(dtype), cut(batch_of(dtype=dtype)), in_step=in_step, **settings
    )
    assert verdict.cause == "exact"
    assert verdict.relative_error <= most
    assert "gave the gradient of the whole batch" in str(verdict)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9")
@pytest.mark.parametrize(("name", "given"), [("mkldnn.matmul", "bf16"), ("cuda.matmul", "tf32"), ("cudnn.rnn", "ieee")])
def test_a_part_of_a_backend_may_have_a_precision_of_its_own(name: str, given: str) -> None:
    """Torch then refuses to read the precision of all; what was set is the same afterwards, and the probe runs, too."""
    part = attrgetter(name)(torch.backends)
    with replaced(part, fp32_precision=given):
        callback = AutoAccumulate(16, max_micro_batch_size=4, memory_budget="100MiB")
        fit(loader(32, 16), callback)
        assert (callback.exactness.cause, part.fp32_precision) == ("exact", given)
    assert callback.probe is not None


def test_a_sum_is_told_under_autocast() -> None:
    module = Module(lambda m, b: cross_entropy(m, b, reduction="sum")).float()
    verdict = verdict_on(module, cut(batch_of(dtype=torch.float32)), precision="bf16-mixed")
    assert (verdict.cause, verdict.relative_error > 0.3) == ("sum", True)


def contrastive(module: Any, batch: dict[str, Tensor]) -> Tensor:
    outputs = functional.normalize(module.net(batch["inputs"]), dim=1)
    views = functional.normalize(module.net(batch["inputs"] + 0.1), dim=1)
    return functional.cross_entropy(outputs @ views.T / 0.1, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("loss", "cause"),
    [(contrastive, "coupled"), (lambda m, b: 7 * cross_entropy(m, b, reduction="sum"), "sum")],
)
def test_batch_norm_is_told_and_does_not_hide_the_loss(loss: Any, cause: str) -> None:
    verdict = verdict_on(Module(loss, nn.BatchNorm1d(6)))
    assert verdict.cause == cause
    assert verdict.layers == ("net.1",)
    assert "BatchNorm layers (net.1)" in str(verdict)


@pytest.mark.parametrize(("failing", "count"), [(None, 4), (4, 7)])
def test_batch_norm_alone_is_told_in_four_passes(failing: int | None, count: int) -> None:
    """The batch, its parts, and the batch with the statistics of its parts; these leave noise and state no room.

    If memory runs out in the last one, the batch and its parts follow by running statistics.
    """
    passes: list[None] = []

    def counted(module: Any, batch: dict[str, Tensor]) -> Tensor:
        passes.append(None)
        if len(passes) == failing:
            raise torch.OutOfMemoryError("out of memory")
        return cross_entropy(module, batch)

    assert verdict_on(Module(counted, nn.BatchNorm1d(6))).cause == "batch_norm"
    assert len(passes) == count  # training stops after the measurement


def in_two_views(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples, whose views lie behind one another as the layers see them."""
    inputs = batch["inputs"]
    first, second = module.net(torch.cat([inputs, inputs.sin()])).chunk(2)
    return functional.mse_loss(first, second.exp())


def along_the_last_axis(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A layer that sees one row in which the samples lie."""
    return functional.cross_entropy(module.norm(module.net(batch["inputs"]).T[None])[0].T, batch["targets"])


@pytest.mark.parametrize(
    ("loss", "layers", "settings"),
    [
        (in_two_views, [nn.BatchNorm1d(6)], {}),
        (along_the_last_axis, [], {"norm": nn.BatchNorm1d(3).double()}),
        (cross_entropy, [nn.BatchNorm1d(6, track_running_stats=False)], {}),
    ],
)
def test_batch_norm_alone_is_told_if_its_rows_are_no_samples_or_it_keeps_no_statistics(
    loss: Any, layers: list[nn.Module], settings: dict[str, nn.Module]
) -> None:
    verdict = verdict_on(Module(loss, *layers, **settings))
    assert (verdict.cause, verdict.relative_error > 0.01) == ("batch_norm", True)


def test_batch_norm_that_changes_no_gradient_is_exact() -> None:
    class Frozen(Module):
        def on_train_epoch_start(self) -> None:
            self.net[1].eval()

    assert verdict_on(Frozen(cross_entropy, nn.BatchNorm1d(6))).cause == "exact"
    assert verdict_on(Module(cross_entropy, aside=nn.BatchNorm1d(6)), cut(batch_of(5))).cause == "exact"


@pytest.mark.parametrize("samples", [6, 7])
def test_the_state_of_an_lstm_is_stateful(samples: int) -> None:
    """Parts of unlike sizes cannot follow each other at all, though each of them runs."""

    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        outputs, state = module.lstm(batch["inputs"][:, None], module.state)
        module.state = tuple(each.detach() for each in state)
        return outputs.square().mean()

    module = Module(loss, lstm=nn.LSTM(5, 4, batch_first=True).double(), state=None)
    verdict = verdict_on(module, cut(batch_of(samples), first=(samples + 1) // 2))
    assert (verdict.cause, verdict.tensors) == ("stateful", ("state",))


def test_state_that_no_gradient_depends_on_is_a_note() -> None:
    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        module.seen += len(batch["inputs"])
        module.history.append(batch["inputs"].mean())
        module.accuracy.update(batch["inputs"][:, 0], batch["inputs"][:, 1])
        return cross_entropy(module, batch)

    module = Module(loss, seen=0, history=[], accuracy=torchmetrics.MeanSquaredError())
    verdict = verdict_on(module)
    assert (verdict.cause, sorted(verdict.tensors)) == ("exact", ["history", "seen"])
    assert "seen" not in str(verdict)


def test_a_step_that_follows_the_number_of_its_batch_is_stateful() -> None:
    class Alternating(Module):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = cross_entropy(self, batch)
            return loss * 2 if batch_idx % 2 else loss

    verdict = verdict_on(Alternating(cross_entropy))
    assert verdict.cause == "stateful"
    assert "batch_idx" in str(verdict)
    assert verdict_on(Alternating(cross_entropy), in_step=True).cause == "exact"


def attention(outputs: Tensor) -> Tensor:
    states = outputs[:, None, :, None]
    return functional.scaled_dot_product_attention(states, states, states, dropout_p=0.5)[:, 0, :, 0]


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), lambda outputs: functional.dropout(outputs, 0.5), attention])
@pytest.mark.parametrize(("reduction", "cause"), [("mean", "exact"), ("sum", "sum")])
def test_dropout_does_not_hide_the_verdict(drop: Callable[[Tensor], Tensor], reduction: str, cause: str) -> None:
    """As a layer, as a function, and in attention."""

    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(drop(module.net(batch["inputs"])), batch["targets"], reduction=reduction)

    assert verdict_on(Module(loss, drop=drop)).cause == cause


def noisy(scale: float, **settings: Any) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs = batch["inputs"] + scale * torch.randn(batch["inputs"].shape)
        return cross_entropy(module, {**batch, "inputs": inputs}, **settings)

    return loss


GENERATOR = torch.Generator()  # which no seed reaches


@pytest.mark.parametrize(
    ("loss", "cause", "words"),
    [
        (noisy(0.5), "random", "differ by"),
        (noisy(0.01, reduction="sum"), "sum", "relative error"),
        (lambda m, b: (1 + torch.rand((), generator=GENERATOR)) * cross_entropy(m, b), "random", "though they draw"),
    ],
)
def test_random_numbers_are_told_unless_a_difference_stands_out(loss: Any, cause: str, words: str) -> None:
    verdict = verdict_on(Module(loss))
    assert verdict.cause == cause
    assert (verdict.relative_error is None) == (cause == "random")
    assert words in str(verdict)


def of_few(value: float | Exception) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """A loss that a factor makes odd, or that is refused, where there are less than four samples."""

    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["inputs"]) >= 4:
            return cross_entropy(module, batch)
        if isinstance(value, Exception):
            raise value
        return value * cross_entropy(module, batch)

    return loss


def out_of_memory(module: Any, batch: dict[str, Tensor]) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize(
    ("loss", "cause", "words"),
    [
        (lambda m, b: 0 * cross_entropy(m, b), "unmeasured", "its gradient is zero"),
        (lambda m, b: torch.nan * cross_entropy(m, b), "unmeasured", "its gradient is nan"),
        (lambda m, b: 1e200 * cross_entropy(m, b), "unmeasured", "its gradient is inf"),
        (of_few(torch.nan), "coupled", "a part of a batch has a gradient that is infinite or NaN"),  # of pairs, say
        (of_few(ValueError("too few")), "unmeasured", "ended in ValueError: too few"),
        (out_of_memory, "unmeasured", "memory ran out in the measurement, on 3 samples"),
    ],
)
def test_what_has_no_gradient_costs_no_run(loss: Any, cause: str, words: str) -> None:
    verdict = verdict_on(Module(loss))
    assert verdict.cause == cause
    assert words in str(verdict)


def test_an_error_of_the_users_ends_the_run() -> None:
    with pytest.raises(UserError, match="normalize returned a str"):
        verdict_on(Module(cross_entropy), normalize=lambda _: "many")


def masked_mean(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of what a mask leaves: 0/0 if it leaves nothing."""
    errors = module.net(batch["inputs"]).square().sum(1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def count_mask(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


@pytest.mark.parametrize("kept", [range(4, 7), range(4)])
def test_a_part_without_items_counts_as_in_training(kept: range) -> None:
    """A pass of weight 0 adds nothing, whatever its gradient is."""
    mask = torch.zeros(7)
    mask[kept] = 1
    verdict = verdict_on(Module(masked_mean), cut(batch_of(mask=mask)), normalize=count_mask)
    assert (verdict.cause, verdict.relative_error < 1e-12) == ("exact", True)


@pytest.mark.parametrize("layers", [[], [nn.BatchNorm1d(6, dtype=torch.float64)]])
def test_a_part_without_items_that_nobody_counts_is_told(layers: list[nn.Module]) -> None:
    """Its mean is 0 ÷ 0, which is said in place of a number, and before anything else."""
    mask = torch.tensor([1.0, 1, 0, 0, 0, 0, 0])
    found = verdict_on(Module(masked_mean, *layers), cut(batch_of(mask=mask)))
    assert str(found).startswith("a part of a batch has a gradient that is infinite or NaN")
    assert "nothing to average, such as no target, and 0 ÷ 0 is NaN" in str(found)


def test_batch_norm_does_not_make_a_part_without_items_coupled() -> None:
    """Not by running statistics, either."""
    mask = torch.tensor([0.0, 0, 0, 0, 1, 1, 1])
    module = Module(masked_mean, nn.BatchNorm1d(6, dtype=torch.float64))
    assert verdict_on(module, cut(batch_of(mask=mask)), normalize=count_mask).cause == "batch_norm"


def test_a_part_that_is_counted_wrongly_as_nothing_is_told() -> None:
    mask = torch.tensor([0.0, 0, 0, 0, 1, 1, 1])
    assert verdict_on(Module(cross_entropy), cut(batch_of(mask=mask)), normalize=count_mask).cause == "weighted"


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "random numbers is nan"), (1e200, "random numbers is inf")])
def test_other_random_numbers_without_a_finite_gradient_leave_it_unmeasured(value: float, words: str) -> None:
    """They would have shown whether the difference is noise."""

    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        is_seed_0 = bool(torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0)))
        return cross_entropy(module, batch, reduction="sum") * (1.0 if is_seed_0 else value)

    verdict = verdict_on(Module(loss))
    assert verdict.cause == "unmeasured"
    assert words in str(verdict)


class Trials:
    """Batches of so many samples; memory runs out above a size."""

    def __init__(self, most: int, *, fits: int = 1000, refuses: bool = False) -> None:
        self.most, self.fits, self.refuses = most, fits, refuses
        self.seen, self.total, self.complete, self.empty = most, most, True, most == 0
        self.asked: list[int] = []

    def make(self, samples: int, move: Callable[[Any], Any]) -> tuple[Any, Any]:
        return move(batch_of(samples)), None

    def batch_in_two_parts(
        self, samples: int, move: Callable[[Any], Any], seed: int = 0, multiple: int = 1
    ) -> CutBatch | None:
        self.asked.append(samples)
        if self.refuses:
            raise LayoutError("samples cannot be told apart")
        if samples > self.fits:
            raise torch.OutOfMemoryError("out of memory")
        found = cut(batch_of(samples), first=(samples + 1) // 2)
        return CutBatch(move(found.whole), (move(found.parts[0]), move(found.parts[1])), found.sizes)


def at_start(
    module: Any, batches: Trials, move: Any = lambda batch: batch, *, limit: int = 100, multiple: int = 1
) -> Exactness:
    halves = partial(batches.batch_in_two_parts, multiple=multiple)

    def run(trainer: Any) -> Any:
        return measure(trainer, halves, move, None, available=batches.most, limit=limit, multiple=multiple)[0]

    return in_training(module, run)


def of_many(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss of pairs, say, which finds none among a few samples."""
    return cross_entropy(module, batch) * (len(batch["inputs"]) >= 12)


@pytest.mark.parametrize(
    ("batches", "loss", "asked", "cause", "words"),
    [
        (Trials(100), cross_entropy, [SAMPLES], "exact", ""),
        (Trials(100, fits=3), cross_entropy, [7, 3], "exact", ""),
        (Trials(100, fits=1), cross_entropy, [7, 3], "unmeasured", "memory ran out"),
        (Trials(100), of_many, [7, 28], "exact", ""),
        (Trials(10), of_many, [7, 10], "unmeasured", "its gradient is zero"),
        (Trials(0), cross_entropy, [], "unmeasured", ""),
        (Trials(1), cross_entropy, [], "unmeasured", "one sample has no parts"),
        (Trials(100, refuses=True), cross_entropy, [7], "uncuttable", "samples cannot be told apart"),
    ],
)
def test_a_few_samples_are_measured_at_the_start(batches: Any, loss: Any, asked: Any, cause: str, words: str) -> None:
    """More if their gradient is zero, and fewer if memory runs out, which ends no run."""
    verdict = at_start(Module(loss), batches)
    assert (batches.asked, verdict.cause) == (asked, cause)
    assert words in str(verdict)


@pytest.mark.parametrize(
    ("most", "limit", "fits", "asked"),
    [
        (30, 100, 100, [24]),
        (31, 100, 100, [24]),
        (50, 100, 100, [24, 48]),
        (50, 4, 100, [24]),
        (50, 100, 40, [24, 48, 24]),
    ],
)
def test_the_search_for_a_gradient_ends(most: int, limit: int, fits: int, asked: list[int]) -> None:
    """If no larger multiple is left; a small model may begin above its limit."""
    batches = Trials(most, fits=fits)
    calls = batches.batch_in_two_parts

    def bounded(*given: Any, **named: Any) -> CutBatch | None:
        assert len(batches.asked) < 9
        return calls(*given, **named)

    batches.batch_in_two_parts = bounded  # type: ignore[method-assign]
    verdict = at_start(Module(lambda m, b: 0 * cross_entropy(m, b)), batches, limit=limit, multiple=8)
    assert (batches.asked, verdict.cause, verdict.has_gradient) == (asked, "unmeasured", False)


class Draws(nn.Linear):
    """Draws random numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + torch.randn(len(inputs), self.out_features)


class Factor(nn.Linear):
    """Multiplies its outputs by a factor; by another one if there are few samples."""

    def __init__(self, usual: float, of_few: float) -> None:
        super().__init__(5, 6, dtype=torch.float64)
        self.usual, self.of_few = usual, of_few

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (self.usual if len(inputs) == SAMPLES else self.of_few)


def in_chunks(trainer: Any) -> Exactness:
    chunked = ChunkedModules(trainer, ["net"])
    with chunked.installed():
        settings: dict[str, Any] = {"available": 100, "limit": 100, "chunked": chunked}
        return measure(trainer, Trials(100).batch_in_two_parts, lambda batch: batch, None, **settings)[0]


def test_submodules_in_chunks_that_draw_random_numbers_are_told() -> None:
    """All other verdicts of theirs are in ``integration/test_whole.py``."""
    module = Module(contrastive)
    module.net = Draws(5, 6).double()

    assert in_training(module, in_chunks).cause == "random"


@pytest.mark.parametrize(
    ("whole", "chunks", "cause", "words"),
    [
        (0.0, 0.0, "unmeasured", "its gradient is zero"),
        (1e200, 1e200, "unmeasured", "the norm of its gradient is inf"),
        (torch.nan, torch.nan, "unmeasured", "the norm of its gradient is nan"),
        (1.0, torch.nan, "unmeasured", "the norm of its gradient in chunks is nan"),
        (1.0, 1.0, "exact", ""),
    ],
)
def test_submodules_in_chunks_without_a_finite_gradient_are_unmeasured(
    whole: float, chunks: float, cause: str, words: str
) -> None:
    module = Module(cross_entropy)
    module.net = Factor(whole, chunks)
    verdict = in_training(module, in_chunks)
    assert (verdict.cause, verdict.has_gradient) == (cause, whole != 0)
    assert words in str(verdict)
