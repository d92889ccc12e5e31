"""The verdict is true: one tiny model for each cause, in the mode in use, and a warning exactly where one is due."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from timm.layers import DropPath
from torch import nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate
from torchvision.ops import StochasticDepth
from true_support import (
    FEATURES,
    WAYS,
    Case,
    ClassWeighted,
    Contrastive,
    Normalized,
    Queued,
    Summed,
    Task,
    Trained,
    Way,
    by_turns,
    cut_rightly,
    each_cut,
    each_cut_in_step,
    each_oom,
    each_way,
    error,
    network,
    one_pass,
    pairs,
    run,
    told_or_right,
    train,
)

from lightning_ga import AutoAccumulate
from lightning_ga.plan.weights import TargetTokens

BATCH, MICRO = 12, 4


def loader(samples: int = 36, collate: Any = None) -> Any:
    return DataLoader(pairs(samples), batch_size=BATCH, collate_fn=collate)


def judged(
    module: Callable[[], LightningModule], way: Way, data: Callable[[], Any] = loader, **arguments: Any
) -> Trained:
    """A fit in micro-batches of a third of the batch."""
    return run(Case(module, data, BATCH, MICRO), way, arguments=arguments)


class Bank(Task):
    """A memory bank by sample, as a buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.linspace(-1, 1, 5, dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        predicted = self.predict(batch[0])
        value = (predicted - batch[1] - self.bank.mean()).square().mean()
        self.bank.mul_(0.5).add_(predicted.detach().mean())
        return value


class Taught(Task):
    """A teacher that starts equal to its student and follows it in the step."""

    def __init__(self, follow: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__(outputs=3)
        self.teacher = network(FEATURES, 3).requires_grad_(False)
        self.follow = follow

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0] + 0.3)
        value = (self.predict(batch[0]) - wanted).square().mean() + mse_loss(self.net(batch[0])[:, :1], batch[1])
        self.follow(self.teacher, self.net)
        return value


@torch.no_grad()
def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.mul_(0.9).add_(new, alpha=0.1)


def by_data(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.data = 0.9 * old.data + 0.1 * new.data


FOLLOWS = {"in place": in_place, "by .data": by_data}
INEXACT: dict[str, tuple[str, Callable[[], LightningModule], str]] = {
    "BatchNorm": ("batch_norm", Normalized, r"BatchNorm.*\(norm\)"),
    "a sum over samples": ("sum", Summed, "sum"),
    "in-batch negatives": ("coupled", Contrastive, "coupl|compar|each other"),
    "class weights": ("weighted", ClassWeighted, "weight|mean over"),
    "a queue": ("stateful", Queued, "queue"),
    "a memory bank": ("stateful", Bank, "bank"),
    **{
        f"a teacher in training_step, {name}": ("stateful", lambda f=follow: Taught(f), r"teacher\.")
        for name, follow in FOLLOWS.items()
    },
}


class Clamped(Task):
    """Gradients are clamped as they come, by hooks of the weights."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


INEXACT["hooks of weights that clamp"] = ("stateful", Clamped, "hooks on gradients.*on_before_optimizer_step")


@by_turns(INEXACT, fails=False)
def test_the_cause_is_named_where_accumulation_is_not_exact(name: str, way: Way) -> None:
    """Once at the start of training, with what it is about."""
    cause, module, words = INEXACT[name]
    ours = judged(module, way)
    assert ours.callback.plan.factor == 3
    assert ours.cause == cause
    assert ours.callback.exactness.layers == (("norm",) if cause == "batch_norm" else ())
    (text,) = ours.told
    assert re.search(words, text, re.IGNORECASE), text
    assert re.search(words, str(ours.callback.exactness), re.IGNORECASE)
    assert error(ours, one_pass(Case(module, loader))) > 1e-6


@pytest.mark.parametrize("name", ["BatchNorm", "in-batch negatives", "a queue", "hooks of weights that clamp"])
def test_nothing_is_said_where_nothing_is_cut(name: str) -> None:
    cause, module, _ = INEXACT[name]
    callback = AutoAccumulate(micro_batch_size=BATCH, micro_batching="loader")
    ours = train(module(), loader(), callback)
    assert (ours.told, ours.cause) == ([], cause)
    assert torch.equal(ours.weights, one_pass(Case(module, loader)).weights)


class ScaledWhenComplete(Task):
    """Gradients are scaled when they are complete, as a loop says: after the backward pass, or as they come in it."""

    def __init__(self, within: bool, by_weight: bool) -> None:
        super().__init__()
        self.within, self.by_weight = within, by_weight
        if by_weight:
            for parameter in self.net[0].parameters():
                parameter.register_post_accumulate_grad_hook(self._scale)

    def on_after_backward(self) -> None:
        for parameter in () if self.by_weight else self.net[0].parameters():
            self._scale(parameter)

    def _scale(self, parameter: Any) -> None:
        loop = self.trainer.fit_loop.epoch_loop if self.within else self.trainer.fit_loop
        if not loop._should_accumulate():
            parameter.grad.mul_(0.1)


@each_way
@pytest.mark.parametrize(("within", "by_weight"), [(True, False), (False, False), (False, True)])
def test_hooks_are_told_that_gradients_are_complete_after_the_last_piece(
    within: bool, by_weight: bool, way: Way
) -> None:
    cut_rightly(Case(lambda: ScaledWhenComplete(within, by_weight), loader, BATCH, MICRO), way)


class Clipped(Task):
    """Gradients are clipped after the backward passes of some batches, by their number, or of all."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.number = every, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx + 1

    def on_after_backward(self) -> None:
        if self.number % self.every == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


@each_way
@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_that_clips_sees_the_gradient_of_the_batch_where_that_is_cut(every: int, way: Way) -> None:
    case = Case(lambda: Clipped(every), loader, BATCH, MICRO)
    ours, is_cut = run(case, way), way is not WAYS["loader"]
    assert (error(ours, one_pass(case)) <= 1e-12) == is_cut
    assert all("with the same result" in text for text in ours.ran_out)
    assert ours.cause == ("exact" if way.mode == "step" else "stateful")
    assert bool(re.search("hooks on gradients.*gradient_clip_val", " ".join(ours.told))) == (not is_cut)


class Tables(Task):
    """Tables that are filled when they are first needed: as large as is needed, by the samples, or by how many came."""

    def __init__(self, kind: str, matters_from: int | None = None) -> None:
        super().__init__()
        self.kind, self.matters_from = kind, matters_from
        self.register_buffer("table", torch.zeros(FEATURES, dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        if self.kind == "samples":
            self.table.copy_(torch.maximum(self.table, batch[0].amax(0)))
        elif self.kind == "count":
            self.table += len(batch[0])
        elif self.kind == "average":
            self.table.lerp_(batch[0].mean(0), 0.1)
        elif self.kind == "growing":  # by more entries in parts than in one pass
            self.table = torch.cat([self.table, batch[0][: len(batch[0]) // 2 + 1, 0]])
        elif not self.table.any():
            self.table.copy_(torch.arange(1, FEATURES + 1).cos())
        is_read = self.kind == "positions" or (self.matters_from is not None and self.global_step >= self.matters_from)
        return super().loss((batch[0] * self.table if is_read else batch[0], batch[1]))


@by_turns(["positions", "samples", "count"], name="kind")
def test_state_that_parts_leave_as_the_whole_does_is_none_of_what_steps_change(kind: str, way: Way) -> None:
    ours = cut_rightly(Case(lambda: Tables(kind), loader, BATCH, MICRO), way)
    whole = train(Tables(kind), loader(), AutoAccumulate(BATCH, micro_batch_size=BATCH, verify=False))
    assert torch.equal(ours.module.table, whole.module.table)


@each_cut
def test_state_that_a_loss_reads_later_is_told_then(way: Way) -> None:
    ours = run(Case(lambda: Tables("count", matters_from=5), loader, BATCH, MICRO), way, max_epochs=4)
    assert ours.cause == "stateful"
    (text,) = ours.told
    assert "for this training" in text
    assert "table" in text


@each_cut
@pytest.mark.parametrize("kind", ["average", "growing"])
def test_state_that_parts_leave_otherwise_is_told_though_no_gradient_depends_on_it(kind: str, way: Way) -> None:
    ours = run(Case(lambda: Tables(kind), loader, BATCH, MICRO), way)
    assert ours.cause == "stateful"
    (text,) = ours.told
    assert "table" in text


class Numbered(Task):
    """A loss that grows with the number of the batch, as the schedule of a domain-adversarial network does."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.counts, self.batches = counts, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = {
            "argument": lambda: batch_idx,
            "the last": lambda: float(self.trainer.is_last_batch),
            "hook": lambda: self.batches,
            "loop": lambda: self.trainer.fit_loop.total_batch_idx,
            "all": lambda: 1 / self.trainer.num_training_batches,  # the weight of a prior, say
            "step": lambda: self.global_step,
            "steps": lambda: (self.global_step + 1) / self.trainer.estimated_stepping_batches,
        }[self.counts]()
        return self.loss(batch) + number * self.net(batch[0]).square().mean()


@by_turns(["argument", "the last", "hook", "loop", "all", "step", "steps"], name="counts")
def test_a_step_that_counts_batches_is_told_where_micro_batches_are_counted(counts: str, way: Way) -> None:
    """Where the loader cuts: at the start, or in the epoch after the one in which memory ran out."""
    case = Case(lambda: Numbered(counts), loader, BATCH, MICRO)
    ours, oracle = run(case, way, max_epochs=2), one_pass(case, max_epochs=2)
    if counts in ("step", "steps") or way.mode == "step":
        assert error(ours, oracle) <= 1e-12
        assert (ours.cause, ours.told) == ("exact", [])
    else:
        assert error(ours, oracle) > 1e-6
        assert ours.cause == "stateful"
        (text,) = ours.told
        assert "batch_idx" in text
        assert 'trainer.global_step, which counts optimizer steps, or micro_batching="step"' in text
    assert all("with the same result" in text for text in ours.ran_out)


WORDS, LENGTH = 11, 9


def sentences(count: int = 36) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    labels = words.where(torch.arange(LENGTH) < lengths, -100)
    return [{"words": a, "labels": b} for a, b in zip(words, labels)]


class Language(Task):
    """A mean over tokens, of which those with label -100 are none; causal models leave the first out."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Embedding(WORDS, 7), nn.Tanh(), nn.Linear(7, WORDS)).double()
        self.shift = shift

    def loss(self, batch: Any) -> torch.Tensor:
        logits, labels = self.predict(batch["words"]), batch["labels"]
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_sentences() -> Any:
    return DataLoader(sentences(), batch_size=BATCH)


@each_cut
@pytest.mark.parametrize("shift", [False, True])
def test_a_counter_is_proposed_that_makes_a_mean_over_tokens_exact(shift: bool, way: Way) -> None:
    """What the sentence proposes can be copied: with it the verdict is exact, and the training is that of one pass."""
    module = lambda: Language(shift)  # noqa: E731
    ours = judged(module, way, of_sentences)
    assert ours.cause == "weighted"
    proposed = re.search(r"TargetTokens\([^)]*\)", ours.told[0])
    assert proposed, ours.told[0]
    counter = eval(proposed[0], {"TargetTokens": TargetTokens})
    assert counter == TargetTokens(shift=shift)
    again = judged(module, way, of_sentences, normalize=counter)
    assert (again.cause, again.told) == ("exact", [])
    assert error(again, one_pass(Case(module, of_sentences))) <= 1e-12


@each_oom
def test_parts_of_a_mean_over_tokens_are_weighted_rightly(way: Way) -> None:
    case = Case(lambda: Language(True), of_sentences, BATCH, MICRO)
    cut_rightly(case, way, normalize=TargetTokens(shift=True))


def mixup(samples: Sequence[Any]) -> list[torch.Tensor]:
    inputs, targets = default_collate(list(samples))
    share, order = torch.rand(()).double(), torch.randperm(len(inputs))
    return [share * value + (1 - share) * value[order] for value in (inputs, targets)]


def masking(samples: Sequence[Any]) -> list[torch.Tensor]:
    inputs, targets = default_collate(list(samples))
    return [inputs.masked_fill(torch.rand(inputs.shape) < 0.3, 0.0), targets]


class InTransfer(Task):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]]


class InStep(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([batch[0] * (torch.rand(batch[0].shape) < 0.7), batch[1]])


class MixedInStep(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        order, share = torch.randperm(len(batch[0])), torch.rand(()).double()
        return super().loss([share * value + (1 - share) * value[order] for value in batch])


RANDOM = {
    "mixup in collate_fn": (Task, mixup),
    "masking in collate_fn": (Task, masking),
    "noise in a transfer hook": (InTransfer, None),
    "masking in the step": (InStep, None),
    "mixup in the step": (MixedInStep, None),
}


@by_turns(RANDOM, fails=False)
def test_random_numbers_are_no_error(name: str, way: Way) -> None:
    module, collate = RANDOM[name]
    ours = judged(module, way, lambda: loader(collate=collate))
    assert ours.told == []
    assert ours.cause == "random" or (ours.cause == "exact" and way.mode == "step" and collate is not None)


class Within(Task):
    """A regression with some layer between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.used(self.layer(inputs), len(inputs)))


class Functional(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(inputs, 0.4, training=self.training)


class Always(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(inputs, 0.4)


class InVain(nn.Module):
    """Draws numbers that change nothing."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0 * torch.rand(inputs.shape)


class Recurrent(nn.Module):
    """Each sample is a sequence of two vectors of three; dropout is drawn within the kernel."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.layer = nn.LSTM(3, 3, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.view(-1, 2, 3))[0].flatten(1)


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "nn.Dropout": lambda: nn.Dropout(0.4),
    "F.dropout": Functional,
    "LSTM": Recurrent,
    "StochasticDepth by batch": lambda: StochasticDepth(0.4, "batch"),
    "DropPath": lambda: DropPath(0.4),
}


@by_turns(DROPOUTS, fails=False)
def test_dropout_of_any_kind_is_left_out_of_the_measurement(name: str, way: Way) -> None:
    ours = judged(lambda: Within(DROPOUTS[name]()), way)
    assert (ours.cause, ours.told) == ("exact", [])
    assert ours.callback.exactness.relative_error <= 1e-12
    assert all(part.training for part in ours.module.modules())


@each_cut
@pytest.mark.parametrize("layer", [Always, InVain])
def test_random_numbers_that_no_layer_knows_of_are_no_error(layer: Callable[[], nn.Module], way: Way) -> None:
    ours = judged(lambda: Within(layer()), way)
    assert ours.told == []
    assert ours.cause == "exact" or (ours.cause == "random" and layer is Always)


@each_cut
def test_dropout_hides_no_error(way: Way) -> None:
    """Beside it, a loss that couples samples is still found."""

    class Both(Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(2, nn.Dropout(0.4))

        def predict(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

    assert judged(Both, way).cause == "coupled"


class Detector(nn.Module):
    """Losses in training, predictions otherwise, as torchvision's detectors; dropout and frozen BatchNorm within."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout, self.norm = network(), nn.Dropout(0.3), nn.BatchNorm1d(FEATURES).double()

    def train(self, mode: bool = True) -> "Detector":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        predicted = self.net(self.dropout(self.norm(inputs)))
        if not self.training:
            return [{"boxes": row} for row in predicted]
        assert targets is not None
        return {"regression": mse_loss(predicted, targets), "size": 0.1 * predicted.square().mean()}


class Detection(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = Detector()

    def on_train_start(self) -> None:
        self.train()  # a Trainer leaves modes as they are

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.training
        return sum(self.net(*batch).values())


@each_cut
def test_a_model_is_measured_in_training_mode(way: Way) -> None:
    ours = judged(Detection, way)
    assert (ours.cause, ours.told) == ("exact", [])
    assert ours.callback.exactness.relative_error <= 1e-12
    assert not ours.module.net.norm.training


def series(count: int = 36) -> list[torch.Tensor]:
    """Sequences of unequal lengths; small at the end, so that their last step matters little."""
    generator = torch.Generator().manual_seed(4)
    lengths = [20 + 3 * (n % 7) + n % 3 for n in range(count)]
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]


def padded(samples: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": pad_sequence(list(samples), True), "lengths": torch.tensor([len(sample) for sample in samples])}


class ShiftedAfterPadding(Task):
    """Predicts the next step: the longest sequence of a batch has none after its last, others have padding there."""

    def __init__(self) -> None:
        super().__init__(1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, lengths = batch["x"], batch["lengths"]
        inputs, targets = x[:, :-1], x[:, 1:]
        mask = torch.arange(inputs.shape[1]) < lengths[:, None]
        errors = (self.predict(inputs[:, :, None])[:, :, 0] - targets).square() * mask
        return (errors.sum(1) / lengths).mean()


def of_series() -> Any:
    return DataLoader(series(), batch_size=BATCH, collate_fn=padded)




@each_cut
def test_a_small_error_is_an_error(way: Way) -> None:
    """Targets that are shifted after padding couple samples at less than a hundredth, or a thousandth."""

    class Slightly(ShiftedAfterPadding):
        def loss(self, batch: Any) -> torch.Tensor:
            exact = (self.net(batch["x"][:, :5].unsqueeze(-1)) - 1).square().mean()
            return 0.6 * super().loss(batch) + 8 * exact

    case = Case(Slightly, of_series, BATCH, MICRO)
    ours, right = run(case, way), one_pass(case)
    wrong = float((ours.gradients[0] - right.gradients[0]).norm() / right.gradients[0].norm())
    assert 1e-4 < wrong < 1e-2 or way is WAYS["step"]  # pieces of one batch keep its padding
    if wrong > 1e-12:
        assert ours.cause in ("coupled", "weighted")
        assert len(ours.told) == 1
    else:
        assert (ours.cause, ours.told) == ("exact", [])


def with_share(samples: Sequence[Any]) -> dict[str, Any]:
    """What each sample weighs is written by the collate function, for its own batch."""
    inputs, targets = default_collate(list(samples))
    return {"x": inputs, "y": targets, "share": 1.0 / len(samples)}


class Shared(Task):
    def loss(self, batch: Any) -> torch.Tensor:
        return ((self.predict(batch["x"]) - batch["y"]).square() * batch["share"]).sum()


WITH_SHARE = Case(Shared, lambda: loader(collate=with_share), BATCH, MICRO)


def test_a_verdict_is_that_of_the_mode_in_use() -> None:
    ours = run(WITH_SHARE, WAYS["loader"])
    assert (ours.cause, ours.told) == ("exact", [])
    assert error(ours, one_pass(WITH_SHARE)) <= 1e-12


@each_cut_in_step
def test_what_is_exact_only_when_collated_is_not_cut_in_silence(way: Way) -> None:
    told_or_right(WITH_SHARE, way)
