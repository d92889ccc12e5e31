"""What the submodules of ``whole=`` are given and return: cut right, or refused by name before training."""

from typing import Any

import pytest
import torch
from reference import quiet_trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from true_support import FEATURES, LOADER, OOM, Case, Task, Way, cut_rightly, each, of_pairs, refused, touch, train

from lightning_ga import AutoAccumulate

BATCH, WHOLE = 8, {"whole": ("encoder",)}


class Encoder(nn.Module):
    """Treats samples by themselves; ``scales`` belong to none."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 5).double()

    def forward(self, inputs: Tensor, scales: Any = (1.0,)) -> Tensor:
        touch("forward", len(inputs))
        hidden = self.net(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: touch("backward", len(inputs)))
        return sum(scale * (scale * hidden).tanh() for scale in scales)


class ByFeature(Encoder):
    """One scale a feature, and as many as the check has samples."""

    def forward(self, inputs: Tensor, scales: Any) -> Tensor:
        return super().forward(inputs) * scales


class Both(Encoder):
    """Is given two views of all samples and one label of each."""

    def forward(self, inputs: Tensor, scales: Any) -> Tensor:
        return super().forward(inputs) * scales.repeat(2, 1)


class Sequences(nn.Module):
    """Pads to the longest sequence of those that it is given, or takes packed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(1, 5, batch_first=True).double()

    def forward(self, inputs: Any, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            hidden: Tensor = self.net(inputs)[1][0][0]
            return hidden
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.net(packed)[0], batch_first=True)[0]


def compared(outputs: Tensor, others: Tensor) -> Tensor:
    logits = normalize(outputs) @ normalize(others).T
    return cross_entropy(logits, torch.arange(len(logits)))


def scaled_by(*scales: Any) -> Any:
    """A loss whose encoder is called with this besides."""

    def loss(task: Task, batch: Any) -> Tensor:
        return compared(task.encoder(batch[0], *scales), task.encoder(batch[0].tanh(), *scales))

    return loss


def packed(task: Task, batch: Any) -> Tensor:
    lengths = 2 + torch.arange(len(batch[0])) % 3
    given = pack_padded_sequence(batch[0][..., None], lengths, batch_first=True, enforce_sorted=False)
    return compared(task.encoder(given), task.other(batch[0]))


def padded(task: Task, batch: Any) -> Tensor:
    lengths = 2 + torch.arange(len(batch[0])) // 2
    return compared(task.encoder(batch[0][..., None], lengths).sum(1), task.other(batch[0]))


def joined(task: Task, batch: Any) -> Tensor:
    return compared(*task.encoder(torch.cat([batch[0], batch[0].tanh()]), batch[1]).chunk(2))


def case(loss: Any, encoder: Any = Encoder) -> Case:
    def make() -> Task:
        torch.manual_seed(3)
        return Task(loss, encoder=encoder(), other=nn.Linear(FEATURES, 5).double())

    return Case(make, batch=BATCH)


RIGHT = {
    "numbers, as many as samples": case(scaled_by([0.1 * k for k in range(1, BATCH + 1)])),
    "a tensor, as long as the batch": case(scaled_by(torch.linspace(0.1, 0.8, BATCH, dtype=torch.float64))),
    "a tensor, as long as that of the check": case(scaled_by(torch.linspace(1, 2, 5, dtype=torch.float64)), ByFeature),
}


@pytest.mark.parametrize("kind", RIGHT)
@each("loader", "oom")
def test_what_belongs_to_no_sample_is_passed_on_whole(kind: str, way: Way) -> None:
    """Also if it is as long as the batch by chance."""
    cut_rightly(RIGHT[kind], way, arguments=WHOLE)


REFUSED = {
    "packed sequences": (case(packed, Sequences), ["in chunks", "RuntimeError", 'whole="auto"']),
    "padded to the longest of a chunk": (case(padded, Sequences), ["cannot be joined", "pad them to the longest"]),
    "arguments of other lengths": (case(joined, Both), ["in chunks", "RuntimeError", "entry for each sample"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_or_joined_is_refused_before_training(kind: str) -> None:
    """In a sentence, not by an error of a chunk in the middle of training."""
    which, words = REFUSED[kind]
    refused(which, LOADER, *words, arguments=WHOLE)


def with_teacher(task: Task, batch: Any) -> Tensor:
    """The loss of a student against a teacher that follows it, and a queue, which the step fills."""
    outputs = task.encoder(batch[0])
    with torch.no_grad():
        for mine, theirs in zip(task.teacher.parameters(), task.encoder.parameters()):
            mine.mul_(0.9).add_(theirs, alpha=0.1)
        keys = task.teacher(batch[0].tanh())
    logits = torch.cat([(outputs * keys).sum(1, keepdim=True), outputs @ task.queue.T.clone()], 1)
    task.queue = torch.cat([task.queue[len(keys) :], keys])
    return cross_entropy(logits, torch.zeros(len(outputs), dtype=torch.long))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_teacher_that_the_step_moves_is_put_back_after_an_error(place: str) -> None:
    """Momentum contrast: its weights are known to change, as the check has seen it."""
    stateful = case(with_teacher)

    def make() -> Task:
        task = stateful.module()
        task.teacher = Encoder().requires_grad_(False)
        task.queue = torch.linspace(-1, 1, 80, dtype=torch.float64).view(16, 5)
        return task

    ours = AutoAccumulate(micro_batch_size=BATCH, **WHOLE)
    survived, oracle = train(make(), of_pairs(), ours, memory=OOM.memory(place)), train(make(), of_pairs())
    assert (survived.weights - oracle.weights).abs().max() <= 1e-12
    assert survived.callback.oom_events == 1
    assert ours.exactness is not None
    assert ours.exactness.cause == "exact"
    assert all("with the same result" in text for text in survived.ran_out)


class Validated(Task):
    """Memory runs out if more than half of a batch is validated at once."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > BATCH // 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.log("compared", self.own(self, batch))


def test_an_error_in_evaluation_does_not_call_a_loss_of_pairs_the_same() -> None:
    """Each part compares its samples alone, whatever training does."""
    task = Validated(scaled_by(), encoder=Encoder())
    with pytest.warns(UserWarning, match="compares samples with each other .* that of parts"):
        quiet_trainer(AutoAccumulate()).validate(task, of_pairs(BATCH), verbose=False)
