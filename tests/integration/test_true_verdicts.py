"""The verdict is true: one tiny model for each cause, in the mode in use, and a warning exactly where one is due."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from reference import quiet_trainer
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchvision.ops import StochasticDepth
from true_support import (
    FEATURES,
    LOADER,
    ROUNDING,
    VERDICTS,
    WAYS,
    Case,
    Task,
    Way,
    by_turns,
    contrastive,
    cut_rightly,
    each,
    each_cut,
    each_cut_in_step,
    each_oom,
    each_way,
    error,
    network,
    of_pairs,
    one_pass,
    pairs,
    run,
    told,
    told_or_right,
    train,
)

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.plan.weights import TargetTokens

BATCH, MICRO = 12, 4


def loader(collate: Any = None) -> Any:
    return of_pairs(36, BATCH, collate_fn=collate)


def case(module: Callable[[], LightningModule], data: Callable[[], Any] = loader) -> Case:
    """A fit in micro-batches of a third of the batch."""
    return Case(module, data, BATCH, MICRO)


def banked() -> Task:
    """A memory bank by sample, as a buffer that is written in place."""

    def loss(task: Task, batch: Any) -> Tensor:
        predicted = task.predict(batch[0])
        value = (predicted - batch[1] - task.bank.mean()).square().mean()
        task.bank.mul_(0.5).add_(predicted.detach().mean())
        return value

    return Task(loss, bank=torch.linspace(-1, 1, 5, dtype=torch.float64))


def taught(follow: Callable[[nn.Module, nn.Module], None]) -> Task:
    """A teacher that starts equal to its student and follows it in the step."""

    def loss(task: Task, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = task.teacher(batch[0] + 0.3)
        value = (task.predict(batch[0]) - wanted).square().mean() + mse_loss(task.net(batch[0])[:, :1], batch[1])
        follow(task.teacher, task.net)
        return value

    return Task(loss, outputs=3, teacher=network(FEATURES, 3).requires_grad_(False))


@torch.no_grad()
def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.mul_(0.9).add_(new, alpha=0.1)


def by_data(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.data = 0.9 * old.data + 0.1 * new.data


def clamped() -> Task:
    """Gradients are clamped as they come, by hooks of the weights."""
    task = Task()
    for parameter in task.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return task


INEXACT = VERDICTS | {
    "a memory bank": ("stateful", banked, "bank"),
    "a teacher in training_step": ("stateful", lambda: taught(in_place), r"teacher\."),
    "a teacher in training_step, by .data": ("stateful", lambda: taught(by_data), r"teacher\."),
    "hooks of weights that clamp": ("stateful", clamped, "hooks on gradients.*on_before_optimizer_step"),
}


@by_turns(INEXACT, fails=False)
def test_the_cause_is_named_where_accumulation_is_not_exact(name: str, way: Way) -> None:
    """Once at the start of training, with what it is about."""
    cause, module, words = INEXACT[name]
    ours = told(case(module), way, cause, words)
    assert ours.callback.plan.factor == 3
    assert ours.callback.exactness.layers == (("norm",) if cause == "batch_norm" else ())
    assert re.search(words, str(ours.callback.exactness), re.IGNORECASE)


@pytest.mark.parametrize("name", ["BatchNorm", "in-batch negatives", "a queue", "hooks of weights that clamp"])
def test_nothing_is_said_where_nothing_is_cut(name: str) -> None:
    cause, module, _ = INEXACT[name]
    callback = AutoAccumulate(micro_batch_size=BATCH, micro_batching="loader")
    ours = train(module(), loader(), callback)
    assert (ours.told, ours.cause) == ([], cause)
    assert torch.equal(ours.weights, one_pass(case(module)).weights)


@each_oom
@pytest.mark.parametrize("name", VERDICTS)
def test_an_inexact_result_is_never_called_the_same(name: str, way: Way) -> None:
    """At factor 1 nothing is said at the start, and the warning about memory names the verdict."""
    cause, module, words = VERDICTS[name]
    ours = told(Case(module), way, cause, words)
    assert (ours.callback.oom_events, ours.callback.plan.factor, ours.told) == (1, 1, [])


@each_oom
def test_what_was_not_measured_is_not_called_the_same(way: Way) -> None:
    ours = run(Case(), way, arguments={"verify": False})
    assert error(ours, one_pass(Case())) <= ROUNDING
    assert "same result" not in ours.ran_out[0]


# --- hooks on gradients, and state --------------------------------------------------------------


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
    cut_rightly(case(lambda: ScaledWhenComplete(within, by_weight)), way)


class Clipped(Task):
    """Gradients are clipped after the backward passes of some batches, by their number, or of all."""

    def __init__(self, every: int) -> None:
        super().__init__(every=every, number=0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx + 1

    def on_after_backward(self) -> None:
        if self.number % self.every == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


@each_way
@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_that_clips_sees_the_gradient_of_the_batch_where_that_is_cut(every: int, way: Way) -> None:
    clipped = case(lambda: Clipped(every))
    if way is WAYS["loader"]:
        told(clipped, way, "stateful", "hooks on gradients.*gradient_clip_val")
        return
    ours = run(clipped, way)
    assert error(ours, one_pass(clipped)) <= ROUNDING
    assert all("with the same result" in text for text in ours.ran_out)
    assert (ours.cause, ours.told) == ("exact" if way.mode == "step" else "stateful", [])


class Tables(Task):
    """Tables that are filled when they are first needed: as large as is needed, by the samples, or by how many came."""

    def __init__(self, kind: str, matters_from: int | None = None) -> None:
        dtype = torch.long if kind == "count" else torch.float64
        super().__init__(kind=kind, matters_from=matters_from, table=torch.zeros(FEATURES, dtype=dtype))

    def loss(self, batch: Any) -> Tensor:
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
    ours = cut_rightly(case(lambda: Tables(kind)), way)
    whole = train(Tables(kind), loader(), AutoAccumulate(BATCH, micro_batch_size=BATCH, verify=False))
    assert torch.equal(ours.module.table, whole.module.table)


@each_cut
def test_state_that_a_loss_reads_later_is_told_then(way: Way) -> None:
    reads = case(lambda: Tables("count", matters_from=5))
    told(reads, way, "stateful", "for this training.*table", max_epochs=4)


def with_statistics() -> Task:
    """Samples are normalized by themselves, and running statistics count the passes."""
    task = Task()
    norm = nn.InstanceNorm1d(1, track_running_stats=True).double()
    task.net[0] = nn.Sequential(nn.Unflatten(1, (1, -1)), norm, nn.Flatten(), task.net[0])
    return task


@each_cut
@pytest.mark.parametrize(
    ("module", "name"),
    [(lambda: Tables("average"), "table"), (lambda: Tables("growing"), "table"), (with_statistics, "running_mean")],
    ids=["average", "growing", "InstanceNorm"],
)
def test_state_that_parts_leave_otherwise_is_told_though_no_gradient_depends_on_it(
    module: Any, name: str, way: Way
) -> None:
    ours = run(case(module), way)
    assert ours.cause == "stateful"
    (text,) = ours.told
    assert name in text


class Carried(Task):
    """A state that is carried from step to step, and begins anew where the batch has another size."""

    carried: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        hidden = torch.tanh(self.predict(batch[0]))
        goes_on = self.carried is not None and len(self.carried) == len(hidden)
        before = self.carried if goes_on else 0.0 * hidden.detach()
        self.carried = hidden.detach()
        return mse_loss(hidden + 0.3 * before, batch[1])


def hidden_teacher() -> Task:
    """A teacher that is no part of the module."""

    def loss(task: Task, batch: Any) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(task.teacher[0].parameters(), task.net.parameters()):
                slow.lerp_(fast, 0.001)
            wanted = task.teacher[0](batch[0])
        return mse_loss(task.predict(batch[0]), wanted + batch[1])

    return Task(loss, teacher=[network()])


@pytest.mark.parametrize("module", [Carried, hidden_teacher])
@each_way
def test_state_that_nobody_sees_shows_in_a_step_that_is_repeated(module: Any, way: Way) -> None:
    """The same batch has another gradient then. After an error, the run ends if weights have no copy."""
    if way.fails and module is hidden_teacher:
        with pytest.raises(UserError, match=r"of which no copies are made \(teacher.0.0.weight\)"):
            run(case(module), way)
        return
    ours = run(case(module), way)
    assert ours.cause == "stateful"
    assert len(ours.told) == (0 if way.fails else 1)
    assert "same result" not in " ".join(ours.ran_out)


class Numbered(Task):
    """A loss that grows with the number of the batch, as the schedule of a domain-adversarial network does."""

    def __init__(self, counts: str) -> None:
        super().__init__(counts=counts, batches=0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
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
    """Where the loader cuts. After an error it does not: the step goes on to cut, which is exact."""
    numbered = case(lambda: Numbered(counts))
    ours, oracle = run(numbered, way, max_epochs=2), one_pass(numbered, max_epochs=2)
    depends = counts not in ("step", "steps") and way.mode == "loader"
    assert ours.cause == ("stateful" if depends else "exact")
    if way is LOADER and depends:
        assert error(ours, oracle) > 1e-6
        (text,) = ours.told
        assert "batch_idx" in text
        assert 'trainer.global_step, which counts optimizer steps, or micro_batching="step"' in text
    else:
        assert error(ours, oracle) <= ROUNDING
        assert ours.told == []
    assert all("with the same result" in text for text in ours.ran_out)


class Copied(Task):
    """A network that is copied after every fourth batch."""

    def __init__(self) -> None:
        super().__init__(target=network().requires_grad_(False))

    def loss(self, batch: Any) -> Tensor:
        return self.regression(batch[0], batch[1] + self.target(batch[0] + 1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            self.target.load_state_dict(self.net.state_dict())


class Seldom(Task):
    """The optimizer steps after every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Rated(Task):
    """A learning rate by the part of the epoch that is done, set by a hook around the optimizer's step, or after it."""

    def __init__(self, where: str, part: str = "batch") -> None:
        super().__init__(where=where, part=part)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def rate(self, where: str) -> None:
        if where == self.where:
            trainer, batch = self.trainer, self.trainer.fit_loop.epoch_loop.batch_idx
            factor = 1 if self.part == "batch" else trainer.accumulate_grad_batches
            done = batch // factor / -(-trainer.num_training_batches // factor)
            trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 - done)

    def optimizer_step(self, *given: Any, **named: Any) -> None:
        self.rate("before")
        super().optimizer_step(*given, **named)
        self.rate("after")

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.rate("clipping")

    def lr_scheduler_step(self, *_: Any) -> None:
        self.rate("schedule")

    def on_train_batch_end(self, *_: Any) -> None:
        self.rate("end")


def planned() -> Task:
    """Learning rates of all micro-batches, made at the start and looked up by number."""

    class Planned(Task):
        def on_train_start(self) -> None:
            self.rates = [0.1 / (1 + n) for n in range(2 * self.trainer.num_training_batches)]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            number = self.current_epoch * self.trainer.num_training_batches + batch_idx
            self.trainer.optimizers[0].param_groups[0]["lr"] = self.rates[number]

    return Planned()


BY_NUMBER: dict[str, Callable[[], Task]] = {
    "copies": Copied,
    "steps seldom": Seldom,
    **{where: partial(Rated, where) for where in ("before", "after", "clipping", "schedule", "end")},
    "planned": planned,
}


@pytest.mark.parametrize("name", BY_NUMBER)
@each("loader", "step", "oom", "oom in step mode")
def test_what_hooks_do_after_some_batches_is_told_where_micro_batches_are_counted(name: str, way: Way) -> None:
    """Though no pass shows it: with two micro-batches, windows end where the hook acts. Not after an error."""
    numbered = Case(BY_NUMBER[name], of_pairs, micro=4)
    ours = run(numbered, way, max_epochs=2)
    assert ours.cause == ("stateful" if way.mode == "loader" else "exact")
    if way is LOADER:
        assert not torch.allclose(ours.weights, one_pass(numbered, max_epochs=2).weights, rtol=1e-6)
        (text,) = ours.told
        assert "batch_idx" in text or "keeps something of each pass" in text
    else:
        assert error(ours, one_pass(numbered, max_epochs=2)) <= ROUNDING
        assert ours.told == []
    assert all("with the same result" in text for text in ours.ran_out)


@pytest.mark.parametrize("where", ["before", "after", "clipping", "schedule"])
@each_way
def test_steps_that_are_counted_by_the_factor_are_exact(where: str, way: Way) -> None:
    cut_rightly(Case(lambda: Rated(where, "step"), of_pairs), way, max_epochs=2)


# --- batches of one task each -------------------------------------------------------------------


def by_task(task: Task, batch: Any) -> Tensor:
    """A loss by the task of the first sample, as all of a batch are of one."""
    predicted = task.predict(batch[0])
    return cross_entropy(predicted, batch[1].long()) if batch[2][0] else mse_loss(predicted[:, :1], batch[1][:, None])


def of_tasks(size: int) -> list[Any]:
    """Samples of two tasks, by turns so many of each."""
    samples = [(x, y[0], number // size % 2) for number, (x, y) in enumerate(pairs(48))]
    return [(x, y.abs().floor().clamp(max=2) if task else y, task) for x, y, task in samples]


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(of_tasks(8))


TASKS = {
    "sequence": (lambda: DataLoader(of_tasks(8), batch_size=8), 8),
    "stream": (lambda: DataLoader(Samples(), batch_size=8), 8),
    "batch sampler": (lambda: DataLoader(of_tasks(4), batch_sampler=torch.arange(48).reshape(-1, 4).tolist()), 4),
}


@pytest.mark.parametrize("name", TASKS)
@each_way
def test_samples_of_several_tasks_are_measured_in_the_batches_that_hold_them(name: str, way: Way) -> None:
    loader, batch = TASKS[name]
    cut_rightly(Case(lambda: Task(by_task, outputs=3), loader, batch, micro=batch // 2), way, max_epochs=2)


@pytest.mark.parametrize(
    ("factor", "arguments", "cause"),
    [
        (2, {"micro_batch_size": 16}, "coupled"),  # two batches in one pass
        (2, {"micro_batch_size": 6}, "coupled"),  # 6 + 5 + 5
        (1, {"effective_batch_size": 12, "micro_batch_size": 4}, "coupled"),
        (2, {"micro_batch_size": 8}, "exact"),
        (1, {"effective_batch_size": 4, "micro_batch_size": 2}, "exact"),
    ],
)
@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning", "ignore:Up to 16 samples are in one pass")
def test_micro_batches_that_mix_tasks_are_not_called_exact(factor: int, arguments: Any, cause: str) -> None:
    ours, module = AutoAccumulate(**arguments), Task(by_task, outputs=3)
    trainer = quiet_trainer(ours, accumulate_grad_batches=factor, max_epochs=1)
    trainer.fit(module, DataLoader(of_tasks(8), batch_size=8))
    assert ours.exactness is not None
    assert ours.exactness.cause == cause


# --- means over tokens --------------------------------------------------------------------------

WORDS, LENGTH = 11, 9


def of_sentences() -> Any:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (36, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (36, 1), generator=generator)
    labels = words.where(torch.arange(LENGTH) < lengths, -100)
    return DataLoader([{"words": a, "labels": b} for a, b in zip(words, labels)], batch_size=BATCH)


def language(shift: bool) -> Task:
    """A mean over tokens, of which those with label -100 are none; causal models leave the first out."""

    def loss(task: Task, batch: Any) -> Tensor:
        logits, labels = task.predict(batch["words"]), batch["labels"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Task(loss, net=nn.Sequential(nn.Embedding(WORDS, 7), nn.Tanh(), nn.Linear(7, WORDS)).double())


@each_cut
@pytest.mark.parametrize("shift", [False, True])
def test_a_counter_is_proposed_that_makes_a_mean_over_tokens_exact(shift: bool, way: Way) -> None:
    """What the sentence proposes can be copied: with it the verdict is exact, and the training is that of one pass."""
    over_tokens = case(lambda: language(shift), of_sentences)
    proposed = re.search(r"TargetTokens\([^)]*\)", told(over_tokens, way, "weighted").told[0])
    assert proposed
    counter = eval(proposed[0], {"TargetTokens": TargetTokens})
    assert counter == TargetTokens(shift=shift)
    cut_rightly(over_tokens, way, arguments={"normalize": counter})


@each_oom
def test_parts_of_a_mean_over_tokens_are_weighted_rightly(way: Way) -> None:
    cut_rightly(case(lambda: language(True), of_sentences), way, arguments={"normalize": TargetTokens(shift=True)})


def in_boxes(task: Task, batch: Any) -> Tensor:
    """A mean over boxes, of which some samples have none."""
    predicted, boxes = task.predict(batch[0]), batch[1]
    errors = [(one - each).square().sum() for one, each in zip(predicted, boxes)]
    return torch.stack(errors).sum() / max(1, number_of_boxes(batch))


def number_of_boxes(batch: Any) -> int:
    return sum(map(len, batch[1]))


def of_boxes() -> Any:
    samples = [(x, y.expand(3 * (number % 3 == 0))) for number, (x, y) in enumerate(pairs(36))]
    return DataLoader(
        samples, batch_size=BATCH, collate_fn=lambda some: (default_collate([x for x, _ in some]), [y for _, y in some])
    )


@each_way
def test_samples_without_items_are_measured_as_they_are_trained(way: Way) -> None:
    """One part of those that are measured counts nothing."""
    cut_rightly(case(lambda: Task(in_boxes), of_boxes), way, arguments={"normalize": number_of_boxes})


# --- random numbers -----------------------------------------------------------------------------


def mixed(batch: Sequence[Tensor]) -> list[Tensor]:
    share, order = torch.rand(()).double(), torch.randperm(len(batch[0]))
    return [share * value + (1 - share) * value[order] for value in batch]


def masked(batch: Sequence[Tensor]) -> list[Tensor]:
    return [batch[0].masked_fill(torch.rand(batch[0].shape) < 0.3, 0.0), batch[1]]


class InTransfer(Task):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]]


RANDOM: dict[str, tuple[Callable[[], Task], Any]] = {
    "mixup in collate_fn": (Task, lambda samples: mixed(default_collate(samples))),
    "masking in collate_fn": (Task, lambda samples: masked(default_collate(samples))),
    "noise in a transfer hook": (InTransfer, None),
    "masking in the step": (lambda: Task(lambda task, batch: task.regression(*masked(batch))), None),
    "mixup in the step": (lambda: Task(lambda task, batch: task.regression(*mixed(batch))), None),
}


@by_turns(RANDOM, fails=False)
def test_random_numbers_are_no_error(name: str, way: Way) -> None:
    module, collate = RANDOM[name]
    ours = run(case(module, lambda: loader(collate)), way)
    assert ours.told == []
    assert ours.cause == "random" or (ours.cause == "exact" and way.mode == "step" and collate is not None)


def within(layer: nn.Module) -> Task:
    """A regression with some layer before."""
    return Task(lambda task, batch: task.regression(task.layer(batch[0]), batch[1]), layer=layer.double())


class Functional(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return functional.dropout(inputs, 0.4, training=self.training)


class Recurrent(nn.Module):
    """Each sample is a sequence of two vectors of three; dropout is drawn within the kernel."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.layer = nn.LSTM(3, 3, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
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
    ours = run(case(lambda: within(DROPOUTS[name]())), way)
    assert (ours.cause, ours.told) == ("exact", [])
    assert ours.callback.exactness.relative_error <= ROUNDING
    assert all(part.training for part in ours.module.modules())


@each_cut
@pytest.mark.parametrize("draws", [lambda x: functional.dropout(x, 0.4), lambda x: x + 0 * torch.rand(x.shape)])
def test_random_numbers_that_no_layer_knows_of_are_no_error(draws: Any, way: Way) -> None:
    """Dropout in evaluation too, and numbers that change nothing."""
    ours = run(case(lambda: Task(lambda task, batch: task.regression(draws(batch[0]), batch[1]))), way)
    assert ours.told == []
    assert ours.cause in ("exact", "random")


@each_cut
def test_dropout_hides_no_error(way: Way) -> None:
    """Beside it, a loss that couples samples is still found."""
    drop = nn.Dropout(0.4)
    both = lambda: Task(lambda task, batch: contrastive(task, [drop(each) for each in batch]), drop=drop)  # noqa: E731
    assert run(case(both), way).cause == "coupled"


class Detector(nn.Module):
    """Losses in training, predictions otherwise, as torchvision's detectors; dropout and frozen BatchNorm within."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout, self.norm = network(), nn.Dropout(0.3), nn.BatchNorm1d(FEATURES).double()

    def train(self, mode: bool = True) -> "Detector":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        predicted = self.net(self.dropout(self.norm(inputs)))
        if not self.training:
            return [{"boxes": row} for row in predicted]
        return {"regression": mse_loss(predicted, targets), "size": 0.1 * predicted.square().mean()}


class Detection(Task):
    def on_train_start(self) -> None:
        self.train()  # a Trainer leaves modes as they are


@each_cut
def test_a_model_is_measured_in_training_mode(way: Way) -> None:
    detection = lambda: Detection(lambda task, batch: sum(task.net(*batch).values()), net=Detector())  # noqa: E731
    ours = run(case(detection), way)
    assert (ours.cause, ours.told) == ("exact", [])
    assert ours.callback.exactness.relative_error <= ROUNDING
    assert not ours.module.net.norm.training


# --- small errors, small micro-batches ----------------------------------------------------------


def series() -> list[Tensor]:
    """Sequences of unequal lengths; small at the end, so that their last step matters little."""
    generator = torch.Generator().manual_seed(4)
    lengths = [20 + 3 * (n % 7) + n % 3 for n in range(36)]
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"x": pad_sequence(list(samples), True), "lengths": torch.tensor([len(sample) for sample in samples])}


def shifted_after_padding(task: Task, batch: Any) -> Tensor:
    """Predicts the next step: the longest sequence of a batch has none after its last, others have padding there."""
    x, lengths = batch["x"], batch["lengths"]
    inputs, targets = x[:, :-1], x[:, 1:]
    mask = torch.arange(inputs.shape[1]) < lengths[:, None]
    errors = (task.predict(inputs[:, :, None])[:, :, 0] - targets).square() * mask
    exact = (task.net(x[:, :5].unsqueeze(-1)) - 1).square().mean()
    return 0.6 * (errors.sum(1) / lengths).mean() + 8 * exact


@each_cut
def test_a_small_error_is_an_error(way: Way) -> None:
    """Targets that are shifted after padding couple samples at less than a hundredth, or a thousandth."""
    of_series = lambda: DataLoader(series(), batch_size=BATCH, collate_fn=padded)  # noqa: E731
    shifted = case(lambda: Task(shifted_after_padding, inputs=1), of_series)
    ours, right = run(shifted, way), one_pass(shifted)
    wrong = float((ours.gradients[0] - right.gradients[0]).norm() / right.gradients[0].norm())
    assert 1e-4 < wrong < 1e-2 or way is WAYS["step"]  # pieces of one batch keep its padding
    if wrong > ROUNDING:
        assert ours.cause in ("coupled", "weighted")
        assert len(ours.told) == 1
    else:
        assert (ours.cause, ours.told) == ("exact", [])


def mined(task: Task, batch: Any) -> Tensor:
    """A mean over samples above the batch's mean loss."""
    losses = (task.predict(batch[0]) - batch[1]).square().flatten()
    return losses[losses >= losses.detach().mean()].mean()


def correlated(task: Task, batch: Any) -> Tensor:
    """Standardized over the batch by hand: of one sample that is no number."""
    predicted = task.predict(batch[0])
    return mse_loss((predicted - predicted.mean()) / predicted.std(), batch[1])


def dropped(task: Task, batch: Any) -> Tensor:
    """A weight of the loss, by a name that begins as those of dropout."""
    predicted = task.predict(batch[0])
    return mse_loss(predicted, batch[1]) + task.drop_weight * (predicted - predicted.T).square().mean()


@pytest.mark.parametrize(
    ("loss", "micro_batch_size"), [(mined, 1), (mined, 2), (mined, 3), (correlated, 4), (dropped, 4)]
)
def test_coupled_samples_are_told(loss: Any, micro_batch_size: int) -> None:
    """Small micro-batches are measured on more samples; a part may have no gradient; only dropout is switched off."""
    coupled = Case(lambda: Task(loss, drop_weight=0.5), loader, BATCH, micro_batch_size)
    told(coupled, WAYS["loader"], "coupled|weighted" if loss is mined else "coupled")


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
def test_autocast_is_not_taken_for_coupling(micro_batching: Any) -> None:
    samples = [(x.float(), y.float()) for x, y in pairs(24)]
    callback = AutoAccumulate(micro_batch_size=3, micro_batching=micro_batching)
    ours = train(Task().float(), DataLoader(samples, batch_size=8), callback, precision="bf16-mixed")
    assert (ours.cause, ours.told) == ("exact", [])


def with_share(samples: Sequence[Any]) -> dict[str, Any]:
    """What each sample weighs is written by the collate function, for its own batch."""
    inputs, targets = default_collate(list(samples))
    return {"x": inputs, "y": targets, "share": 1.0 / len(samples)}


def shared(task: Task, batch: Any) -> Tensor:
    return ((task.predict(batch["x"]) - batch["y"]).square() * batch["share"]).sum()


WITH_SHARE = case(lambda: Task(shared), lambda: loader(with_share))


def test_a_verdict_is_that_of_the_mode_in_use() -> None:
    cut_rightly(WITH_SHARE, WAYS["loader"])


@each_cut_in_step
def test_what_is_exact_only_when_collated_is_not_cut_in_silence(way: Way) -> None:
    told_or_right(WITH_SHARE, way)


# --- the check itself ---------------------------------------------------------------------------


def particular(task: Task, batch: Any) -> Tensor:
    """Refuses the check's small batch."""
    if len(batch[0]) not in (3, 6):
        raise ValueError("only threes")
    return task.regression(*batch)


def test_what_fails_in_the_check_does_not_fail_the_run() -> None:
    """It is said, and training goes on."""
    ours = train(Task(particular), of_pairs(24, 6), AutoAccumulate(micro_batch_size=3))
    (text,) = ours.told
    assert "is not known: not measured: in the check, a step on part of 5 samples ended in ValueError" in text
    assert str(ours.callback.exactness).endswith("a step on part of 5 samples ended in ValueError: only threes")
