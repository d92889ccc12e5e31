"""What an attempt changes is put back, at next to no cost."""

import dataclasses
import random
import weakref

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ga.snapshot.attempt import AttemptSnapshot
from lightning_ga.snapshot.buffers import BufferSnapshot
from lightning_ga.snapshot.copies import SMALL
from lightning_ga.snapshot.gradients import Accumulations, GradientSnapshot, WindowGradientMarks, left_alone


def test_statistics_of_batch_norm_are_put_back() -> None:
    """Their versions do not rise, so nothing but a copy tells."""
    layer = nn.BatchNorm2d(4)
    snapshot = BufferSnapshot(layer)
    for _ in range(3):
        snapshot.take()
        before = [buffer.clone() for buffer in layer.buffers()]
        layer(torch.randn(8, 4, 3, 3))
        assert not torch.equal(before[0], layer.running_mean)
        snapshot.restore()
        assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers()))
        layer(torch.randn(8, 4, 3, 3))


class Large(nn.Module):
    """A mask that never changes and a memory that does, both too large to be copied every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(SMALL // 4 + 1))
        self.register_buffer("memory", torch.zeros(SMALL // 4 + 1))


def test_large_buffers_are_copied_when_they_change() -> None:
    module = Large()
    snapshot = BufferSnapshot(module)
    first = list(snapshot.tensors())
    snapshot.take()
    assert all(a is b for a, b in zip(first, snapshot.tensors()))
    module.memory.add_(1)
    snapshot.restore()
    assert float(module.memory.sum()) == 0
    snapshot.learn()
    module.memory.add_(1)
    snapshot.take()
    assert [float(copy.max()) for copy in snapshot.tensors()] == [1, 1]
    assert all(a is b for a, b in zip(first, snapshot.tensors()))
    module.memory.mul_(5)
    snapshot.restore()
    assert float(module.memory.max()) == 1


def test_large_buffers_that_change_by_their_data() -> None:
    """As codebooks do; their versions tell nothing, so the first attempt is looked at."""
    module = Large()
    snapshot = BufferSnapshot(module)
    for value in (1.0, 2.0, 3.0):
        snapshot.take()
        module.memory.data.add_(10)
        snapshot.restore()
        snapshot.take()
        module.memory.data.add_(1)
        snapshot.learn()
        assert snapshot.lost() is None
        assert float(module.memory.max()) == value
    module.mask.data.zero_()
    assert snapshot.lost() == "a buffer by its .data (mask)"


def test_an_expanded_buffer_is_left_alone() -> None:
    """Nothing can write to it."""
    module = nn.Module()
    module.register_buffer("mask", torch.ones(1, 5).expand(4, 5))
    snapshot = BufferSnapshot(module)
    snapshot.take()
    snapshot.restore()
    assert list(snapshot.tensors()) == []


class Follower(nn.Module):
    """A student, a teacher that follows it, and notes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.calls, self.sizes, self.losses, self.seen = 0, [4], [], {"last": torch.zeros(1)}
        self.drop = nn.Dropout()
        self.generator = torch.Generator().manual_seed(1)
        self.centre = torch.zeros(2)
        self.output: torch.Tensor | None = None

    def step(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        self.student.requires_grad_(False)
        self.calls += 1
        self.losses.append(torch.zeros(1))
        self.sizes.append(3)
        self.seen["last"] = torch.ones(1)
        self.drop.eval()
        self.centre = self.centre + 1
        torch.rand(1, generator=self.generator)
        self.output = self.student(torch.ones(1, 2))


def test_weights_and_attributes_that_a_step_changes_come_back() -> None:
    module = Follower()
    state = AttemptSnapshot(module)
    state.take(None)
    module.step()
    assert state.restore() == "weights without an optimizer (teacher.weight)"
    state.take(None)
    module.step()
    state.learn()
    module.student.requires_grad_(True)
    module.drop.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(3):
        state.take(None)
        drawn = module.generator.get_state()
        module.step()
        assert state.restore() is None
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        assert (len(module.losses), float(module.seen["last"]), module.drop.training) == (1, 1.0, True)
        assert not module.teacher.weight.requires_grad
        assert module.student.weight.requires_grad
        assert torch.equal(module.generator.get_state(), drawn)
        assert float(module.centre[0]) == 1
    assert (module.calls, module.sizes) == (5, [4, 3, 3, 3, 3, 3])  # attempts


def test_outputs_of_the_step_before_are_not_kept_alive() -> None:
    module = Follower()
    state = AttemptSnapshot(module)
    module.output = torch.zeros(2**20)
    module.losses.append(torch.zeros(2**20))
    kept = [weakref.ref(module.output), weakref.ref(module.losses[0])]
    state.take(None)
    module.output = None
    module.losses.clear()
    assert [held() for held in kept] == [None, None]
    state.restore()


def test_a_tensor_that_is_no_buffer_and_changes_in_place_comes_back() -> None:
    """By its data too; one that is trained stays what it is, and an expanded one cannot be written to."""
    module = Follower()
    module.trained = torch.ones(2, requires_grad=True)
    module.wide = torch.ones(1).expand(3)
    state = AttemptSnapshot(module)
    state.take(None)
    module.centre.add_(1)
    module.trained.data.mul_(5)
    assert state.restore() is None
    assert [float(module.centre.sum()), float(module.trained.detach().sum())] == [0, 2]
    assert module.trained.requires_grad


def test_the_state_of_an_lstm_and_what_was_none_come_back() -> None:
    """A tuple of tensors that a step replaces or writes to, and the first tensors under a name that was there."""
    module = Follower()
    module.hidden = first = (torch.zeros(2), (torch.ones(2),))
    module.kernel, module.began, module.name = (3, 3), (), None
    state = AttemptSnapshot(module)
    for _ in range(2):
        module.cache = module.means = None
        state.take(None)
        module.hidden[1][0].data.add_(1)
        module.hidden = (torch.ones(2), (torch.ones(2),))
        module.began, module.kernel = (torch.ones(2),), (5, 5)
        module.cache, module.means, module.name = torch.ones(2), {"a": torch.ones(2)}, "ran"
        assert state.restore() is None
        assert module.hidden is first
        assert float(first[1][0].sum()) == 2
        assert (module.began, module.cache, module.means) == ((), None, None)
        assert (module.kernel, module.name) == ((5, 5), "ran")  # plain Python


def test_elements_of_a_list_that_change_in_place_come_back() -> None:
    """Or are told, where the list is long: copies of all would take too much time."""
    module = Follower()
    module.means = {"a": torch.zeros(2), "b": torch.zeros(2)}
    module.history = [torch.zeros(()) for _ in range(100)]
    module.counts = torch.eye(2).to_sparse()
    state = AttemptSnapshot(module)
    state.take(None)
    module.means["a"].add_(1)
    module.means["b"].data.add_(1)
    module.history.append(torch.ones(()))
    assert state.restore() is None
    assert [float(module.means[name].sum()) for name in "ab"] == [0, 0]
    assert len(module.history) == 100
    state.take(None)
    module.history[7].add_(1)
    assert state.restore() == "a tensor in place that is no buffer (history)"
    state.take(None)
    module.counts.mul_(2)
    assert state.restore() == "a tensor in place that is no buffer (counts)"


class Graph(nn.Module):
    """A module of one's own."""


ODD = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.ones(1).expand(3),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("place", ["attribute", "list", "buffer"])
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_any_kind_may_lie_in_a_module(kind: str, place: str) -> None:
    """The adjacency of a graph, say; where values cannot be copied back a change is told."""
    module, tensor = Graph(), ODD[kind]()
    if place == "buffer":
        module.register_buffer("adjacency", tensor)
    else:
        module.adjacency = [tensor] if place == "list" else tensor
    state = AttemptSnapshot(module)
    for _ in range(2):
        state.take(None)
        state.learn()
        assert state.restore() is None
    if kind in ("coo", "csr", "conjugate"):
        tensor.mul_(2)
        assert "(adjacency)" in str(state.restore())


@dataclasses.dataclass
class Sample:
    """A batch of a kind of one's own."""

    inputs: torch.Tensor
    names: list[str]


def test_containers_of_a_batch_get_their_contents_back() -> None:
    """What a step pops and assigns; what it writes into a tensor is noticed."""
    state = AttemptSnapshot(nn.Module())
    batch = {"x": torch.zeros(3), "more": [torch.zeros(3), Sample(torch.ones(3), ["a"])]}
    inside = batch["more"][1]
    for _ in range(2):
        state.take(batch)
        batch["x"] = batch["x"] / 2
        inside.names.append("b")
        inside.inputs = None
        batch.pop("more").pop()
        assert state.restore() is None
        assert batch["more"][1] is inside
        assert inside.names == ["a"]
        assert torch.equal(inside.inputs, torch.ones(3))
    state.take(batch)
    inside.inputs.div_(2)
    assert state.restore() == "its batch in place (batch['more'][1].inputs)"


def test_random_numbers_and_metrics_are_put_back() -> None:
    module = nn.Module()
    module.mean, module.cat = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    state = AttemptSnapshot(module)
    module.mean(1.0)
    module.cat(torch.ones(2))
    state.take(None)
    drawn = [torch.rand(3), random.random(), np.random.rand()]
    module.mean(9.0)
    module.cat(torch.zeros(3))
    for _ in range(2):  # as often as attempts fail
        state.restore()
        assert module.mean.compute() == 1.0
        assert module.mean._update_count == 1
        assert module.cat.compute().tolist() == [1.0, 1.0]
        assert torch.equal(torch.rand(3), drawn[0])
        assert [random.random(), np.random.rand()] == drawn[1:]
        module.mean(7.0)


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_gradients_that_a_failed_pass_touched_are_complete(fails_after: int) -> None:
    """Autograd goes from the last layer to the first; the retry adds to those that it did not reach."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)
    layers(inputs[:2]).mean().backward()  # an earlier micro-batch
    before = [parameter.grad.clone() for parameter in layers.parameters()]
    marks = GradientSnapshot([*layers.parameters()])
    stopper = list(layers.parameters())[::-2][fails_after]

    def stop(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = stopper.register_hook(stop)
    with pytest.raises(torch.OutOfMemoryError):
        layers(inputs).mean().backward()
    hook.remove()
    touched = marks.restore()
    assert (fails_after > 0) == bool(touched)
    for part in (inputs[:3], inputs[3:]):
        with left_alone(touched):
            (layers(part).mean() / 2).backward()
    whole = torch.autograd.grad(layers(inputs).mean(), list(layers.parameters()))
    for parameter, old, new in zip(layers.parameters(), before, whole):
        torch.testing.assert_close(parameter.grad, old + new, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_gradients_that_are_added_to_more_than_once_come_back(fails_at: int) -> None:
    """Reentrant checkpoints add what a shared layer gets one by one: a failed pass leaves it half done."""
    torch.manual_seed(0)
    shared = nn.Linear(3, 3).double()
    inputs = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    calls = 0

    def count(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient

    def run(part: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            part = checkpoint(lambda x: torch.tanh(shared(x)), part, use_reentrant=True)
        return part.mean()

    accumulations = Accumulations(shared.parameters())
    with accumulations.counted():
        run(inputs).backward()
    assert accumulations.repeated() == list(shared.parameters())
    before = [parameter.grad.clone() for parameter in shared.parameters()]
    marks = GradientSnapshot([*shared.parameters()], accumulations.repeated())
    hook = shared.bias.register_hook(count)
    with pytest.raises(torch.OutOfMemoryError):
        run(inputs).backward()
    hook.remove()
    assert marks.restore() == []
    assert all(torch.equal(p.grad, old) for p, old in zip(shared.parameters(), before))


def test_gradients_that_are_added_to_once_are_not_copied() -> None:
    """However often a parameter is used, on top of an earlier gradient or after that was zeroed."""
    torch.manual_seed(0)
    shared = nn.Linear(3, 3).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)

    def repeated(zero: bool) -> list[torch.Tensor]:
        accumulations = Accumulations(shared.parameters())
        with accumulations.counted():
            found = checkpoint(shared, shared(shared(inputs)), use_reentrant=False).sum()
            if zero:
                shared.zero_grad()
            found.backward()
        return accumulations.repeated()

    assert [repeated(zero) for zero in (False, False, True)] == [[], [], []]


def test_buffers_that_are_exchanged_come_back() -> None:
    """``self.mean = 0.9 * self.mean + …`` is as usual as a change in place."""
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("large", torch.zeros(SMALL // 4 + 1))
    snapshot = BufferSnapshot(layer)
    large = layer.large
    for step in (1.0, 2.0):
        layer.running_mean = torch.full((2,), step)  # a step that went through
        snapshot.take()
        layer.running_mean = layer.running_mean + 10  # and one that fails
        layer.large = layer.large + 1
        layer.register_buffer(f"new{step:.0f}", torch.zeros(1))
        snapshot.restore()
        assert layer.running_mean.tolist() == [step, step]
        assert layer.large is large
        assert not hasattr(layer, f"new{step:.0f}")


class Cached(nn.Module):
    """A layer that may come to hold more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.cache: torch.Tensor | None = None


CHANGES = {
    "weights without an optimizer (0.weight)": lambda part: part.weight.detach().add_(1),
    "the buffers of a module that had none (0)": lambda part: part.register_buffer("late", torch.zeros(1)),
    "what its modules keep (0.cache)": lambda part: setattr(part, "cache", torch.zeros(1)),
    "what its modules keep (0.made)": lambda part: setattr(part, "made", [torch.zeros(1)]),
}


@pytest.mark.parametrize("lost", CHANGES)
def test_what_changes_first_in_a_later_window_is_noticed_at_a_failure_in_it(lost: str) -> None:
    """By an attempt before the one that failed, too: within a window not everything is looked at."""
    model = nn.Sequential(Cached(), Cached())
    state = AttemptSnapshot(model)
    for step in range(20):
        state.take(None, anew=step % 2 == 0)
        state.learn()
    state.take(None, anew=True)
    CHANGES[lost](model[0])
    state.take(None, anew=False)
    assert state.restore() == lost
    state.take(None, anew=True)
    assert state.restore() is None


def test_a_weight_that_changes_within_windows_is_looked_at_before_every_attempt() -> None:
    """A callback that clips weights after every batch, say: what it did before an attempt is no change of that."""
    model = nn.Linear(2, 2)
    state = AttemptSnapshot(model)
    for step in range(24):
        state.take(None, anew=step % 4 == 0)
        assert state.restore() is None
        state.learn()
        model.weight.data.clamp_(-1, 1)
        model.weight.detach().clamp_(-1, 1)


def test_what_changes_in_turns_is_again_as_before_the_attempt() -> None:
    """By a callback, between the batches of a window; and within an attempt."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    state = AttemptSnapshot(model)
    for step in range(24):
        model[0].bias.requires_grad_(step % 2 == 0)
        model[1].train(step % 2 == 0)
        state.take(None, anew=step % 4 == 0)
        state.learn()
        model[0].bias.requires_grad_(step % 3 == 0)
        model[1].train(step % 3 == 0)
        assert state.restore() is None
        assert model[0].bias.requires_grad == model[1].training == (step % 2 == 0)


def test_what_an_attempt_changes_for_a_while_comes_back() -> None:
    """An adversarial step freezes a part and gives it another mode until it ends: memory may run out in between."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = AttemptSnapshot(model)
    mean = model[1].running_mean
    for step in range(24):
        state.take(None, anew=step % 4 == 0)
        model.requires_grad_(False).eval()
        model[1].running_mean = torch.ones(2)
        if step % 2 == 0:
            model.requires_grad_(True).train()
            model[1].running_mean = mean
            state.learn()
        else:
            assert state.restore() is None
            assert all(parameter.requires_grad for parameter in model.parameters())
            assert all(part.training for part in model)
            assert model[1].running_mean is mean


def run_passes(layers: nn.Module, parameters: list[nn.Parameter], marks: WindowGradientMarks, number: int) -> None:
    """Run passes of a window after its first, each after a snapshot of the gradients."""
    for _ in range(number):
        marks.take(parameters)
        layers(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("windows", [0, 5])
def test_gradients_that_a_pass_late_in_a_window_touched_are_told_from_others(windows: int) -> None:
    """Whether gradients are looked for before each pass, or known from an earlier one; one has come in between."""
    layers, marks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), WindowGradientMarks()
    parameters = list(layers.parameters())
    for _ in range(windows):
        layers(torch.ones(1, 2)).sum().backward()
        run_passes(layers, parameters, marks, 4)
        marks.forget()
    layers.zero_grad()
    layers[0](torch.ones(1, 2)).sum().backward()
    assert marks.take(parameters).restore() == []
    layers[1].bias.grad = torch.ones(2)
    marks.take(parameters)
    layers[0](torch.ones(1, 2)).sum().backward()
    taken = marks.take(parameters)
    layers[1](torch.ones(1, 2)).sum().backward()
    assert [any(p is other for other in taken.restore()) for p in parameters] == [False, False, True, True]
    assert taken.lost() is None


def test_a_gradient_that_took_the_place_of_another_is_noticed() -> None:
    """Before the pass or in it: nobody knows, once gradients were never replaced in the first windows."""
    layers, marks = nn.Linear(2, 2), WindowGradientMarks()
    parameters = list(layers.parameters())
    layers(torch.ones(1, 2)).sum().backward()
    run_passes(layers, parameters, marks, 12)
    layers.weight.grad = torch.ones(2, 2)
    assert marks.take(parameters).lost() == "gradients, other tensors being in their place now"


def test_gradients_that_are_replaced_in_every_pass_are_looked_for_before_every_pass() -> None:
    """As those that a hook scales into a new tensor."""
    layers, marks = nn.Linear(2, 2), WindowGradientMarks()
    parameters = list(layers.parameters())
    for _ in range(12):
        layers.weight.grad = torch.ones(2, 2)
        taken = marks.take(parameters)
        assert (taken.restore(), taken.lost()) == ([], None)


@pytest.mark.parametrize("record", [lambda held: {"number": 1, "held": held}, lambda held: [1, held]])
def test_a_record_with_numbers_keeps_nothing_alive(record) -> None:
    """Most often it is an output of the step before."""
    module, held = Whole(), torch.zeros(SMALL)
    module.last, gone = record(held), weakref.ref(held)
    snapshot = AttemptSnapshot(module)
    snapshot.take(None)
    module.last = None
    del held
    assert gone() is None
    module.last = record(torch.zeros(1))
    snapshot.take(None)
    snapshot.restore()
    assert snapshot.left == []
    module.last = record(torch.ones(1))
    snapshot.restore()
    assert [*snapshot.left] == ["last"]


class Whole(nn.Module):
    """A module of the user's own."""


class Cache:
    """Knows for which size its tensor is."""

    def __init__(self) -> None:
        self.size, self.table = 0, None


def test_what_an_object_knows_of_a_tensor_that_goes_goes_with_it() -> None:
    module = Whole()
    module.cache = Cache()
    snapshot = AttemptSnapshot(module)
    snapshot.take(None)
    module.cache.size, module.cache.table = 5, torch.ones(5)
    snapshot.restore()
    assert (module.cache.size, module.cache.table) == (0, None)


class Table(nn.Module):
    """A table that is filled as far as it is needed, and how far that is, as those of rotary embeddings are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.filled, self.calls = kind, 0, 0
        if kind == "buffer":
            self.register_buffer("table", torch.zeros(9), persistent=False)
        elif kind == "none":
            self.table = None

    def forward(self, size: int) -> torch.Tensor:
        self.calls += 1
        if size > self.filled:
            self.filled = size
            if self.kind == "buffer":
                self.table[:size] = torch.arange(1.0, size + 1)
            else:
                self.table = torch.arange(1.0, size + 1)
        return self.table[:size]


@pytest.mark.parametrize("kind", ["buffer", "none", "new"])
@pytest.mark.parametrize("windows", [1, 12])
def test_what_a_layer_knows_of_a_table_goes_back_with_it(kind: str, windows: int) -> None:
    """Its length, as a number of plain Python: else the next attempt would read what was never filled again."""
    module = nn.ModuleDict({"layer": Table(kind)})
    snapshot = AttemptSnapshot(module)
    for number in range(windows):
        snapshot.take(None, anew=True)
        module["layer"](3 if number else 2)
        snapshot.take(None, anew=False)
        module["layer"](3 if number else 2)
    for size in (5, 9):
        snapshot.take(None, anew=False)
        calls = module["layer"].calls
        module["layer"](size)
        snapshot.restore()
        assert (module["layer"].calls, snapshot.left) == (calls, [])
        assert torch.equal(module["layer"](size), torch.arange(1.0, size + 1))


def test_numbers_of_the_module_go_back_with_its_buffers_only() -> None:
    """What counts attempts there goes on counting, and is named."""
    module = Table("buffer")
    snapshot = AttemptSnapshot(module)
    snapshot.take(None)
    module(5)
    snapshot.restore()
    assert (module.filled, module.calls, snapshot.left) == (0, 0, [])
    module(5)
    snapshot.take(None)
    module(5)
    snapshot.restore()
    assert (module.filled, module.calls, snapshot.left) == (5, 2, ["calls"])


@pytest.mark.parametrize("layer", [True, False])
def test_what_hooks_change_between_attempts_of_a_window_stays(layer: bool) -> None:
    """Numbers come back as they were before the attempt, and not as before the window: hooks do not run once more."""
    table = Table("buffer")
    module = nn.ModuleDict({"layer": table}) if layer else table
    snapshot = AttemptSnapshot(module)
    for _ in range(12):
        snapshot.take(None, anew=True)
    table.filled, table.rate = 3, 0.5
    snapshot.take(None, anew=False)
    table(5)
    snapshot.restore()
    assert (table.filled, table.rate, table.calls, snapshot.left) == (3, 0.5, 0, [])
    del table.filled
    snapshot.take(None, anew=False)
    table.table.add_(1)
    snapshot.restore()
    assert not hasattr(table, "filled")
