"""Habits of users' programs: datasets that read batches or ask the model, late buffers, second derivatives."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.nn.functional import mse_loss, pad
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate
from true_support import (
    FEATURES,
    LOADER,
    STEP,
    Case,
    Memory,
    Task,
    Trained,
    Way,
    cut_rightly,
    each_cut,
    each_oom,
    each_way,
    error,
    one_pass,
    pairs,
    run,
    train,
)

from lightning_ga import AutoAccumulate, UserError


def whole_batches() -> DataLoader[Any]:
    return DataLoader(pairs(16), batch_size=8)


class Centered(Task):
    """Its first buffer comes when training starts."""

    def on_train_start(self) -> None:
        self.register_buffer("middle", torch.linspace(-1, 1, FEATURES, dtype=torch.float64))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.predict(batch[0] - self.middle), batch[1])


@each_oom
def test_a_first_buffer_that_comes_at_the_start_is_there_after_an_error(way: Way) -> None:
    cut_rightly(Case(Centered, whole_batches), way)


def test_buffers_of_layers_that_had_none_are_there_after_an_error() -> None:
    """Pruning puts masks into layers at the end of an epoch."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    def pruned(*ours: Any, memory: Memory | None = None) -> Trained:
        masks = callbacks.ModelPruning("l1_unstructured", amount=0.2)
        return train(Task(), whole_batches(), *ours, masks, memory=memory, max_epochs=2)

    ours = pruned(AutoAccumulate(micro_batch_size=8, micro_batching="step"), memory=Memory(3, place="backward"))
    assert ours.callback.oom_events == 1
    assert error(ours, pruned()) <= 1e-12


class Rollouts(IterableDataset):
    """What a policy does, drawn while it learns."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        state = torch.linspace(-1, 1, FEATURES, dtype=torch.float64)
        for number in range(40):
            with torch.no_grad():
                state = torch.sin(state + number + self.act(state))
            yield state, state[:1]


class Policy(Task):
    """It is reached by the dataset itself, by one of its methods, or by a function around it."""

    def __init__(self, how: str = "net") -> None:
        super().__init__()
        self.how = how

    def act(self, state: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(state)
        return result

    def train_dataloader(self) -> DataLoader[Any]:
        net = self.net
        acts = {"net": self.net, "method": self.act, "function": lambda state: net(state)}
        return DataLoader(Rollouts(acts[self.how]), batch_size=8)


@each_way
@pytest.mark.parametrize("how", ["net", "method", "function"])
def test_samples_that_the_model_makes_are_those_of_whole_batches(how: str, way: Way) -> None:
    """Micro-batches of a loader would be read later, when the model has learned: they are cut in the step."""
    ours, stock = run(Case(lambda: Policy(how), lambda: None), way), train(Policy(how), None)
    assert error(ours, stock) <= 1e-12
    assert ours.told == []


def test_it_is_told_why_samples_that_the_model_makes_are_cut_in_the_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        train(Policy(), None, LOADER.callback(8, 4))
    assert "cuts batches in the training step" in caplog.text
    assert "The dataset holds the model" in caplog.text


class Augmenting(LightningDataModule):
    """A dataset has a method of its datamodule, which holds the Trainer."""

    def augment(self, number: int) -> Any:
        return pairs(16)[number]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Transformed(self.augment), batch_size=8)


class Transformed(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        def make_again(number: int) -> Any:
            return unset(number)  # its cell is empty

        self.make, self.never = make, make_again
        if len(self) < 0:
            unset = make

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


def test_a_dataset_that_holds_its_datamodule_is_cut_in_the_loader() -> None:
    """The model is behind the Trainer, which is not looked through."""
    callback = LOADER.callback(8, 4)
    train(Task(), Augmenting(), callback)
    assert callback._fit is not None
    assert not callback._fit.source.cut_in_step


class Padded(Dataset):
    """A batched transform pads to the longest sample that is read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = [torch.full((1 + number % 5, FEATURES), number / 24, dtype=torch.float64) for number in indices]
        longest = max(map(len, samples))
        return [(pad(each, (0, 0, 0, longest - len(each))), len(each), each[0, :1]) for each in samples]


class OfTokens(Task):
    """A mean over tokens, or over padding too."""

    masks = True

    def loss(self, batch: Any) -> torch.Tensor:
        tokens, lengths, targets = batch
        hidden = self.predict(tokens.flatten(0, 1)).view(*tokens.shape[:2])
        if self.masks:
            hidden = hidden * (torch.arange(hidden.shape[1]) < lengths[:, None])
        return mse_loss(hidden.sum(1, keepdim=True), targets)


class OverPadding(OfTokens):
    masks = False


def padded() -> DataLoader[Any]:
    return DataLoader(Padded(), batch_size=8)


@each_way
def test_datasets_that_pad_what_they_read_at_once_are_measured(way: Way) -> None:
    cut_rightly(Case(OfTokens, padded), way)


@each_cut
def test_padding_that_depends_on_what_is_read_at_once_is_told(way: Way) -> None:
    """In step mode, parts have the padding of their batch."""
    case = Case(OverPadding, padded)
    if way.mode == "step":
        cut_rightly(case, way)
        return
    ours = run(case, way)
    assert error(ours, one_pass(case)) > 0.01
    assert ours.cause == "coupled"
    assert len(ours.told) == 1


class Curved(Task):
    """The gradients of a window keep their graph, as for an optimizer that takes second derivatives."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(create_graph=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = [*self.parameters()]
        norm = sum(weight.grad.square().sum() for weight in weights)
        with torch.enable_grad():
            curvature = torch.autograd.grad(norm, weights)
        for weight, value in zip(weights, curvature):
            weight.grad = weight.grad.detach() + 0.01 * value


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@each_cut
def test_gradients_keep_their_graph_over_a_window(way: Way) -> None:
    """Measurements in mid-window would put weights back, which autograd takes for a change."""
    ours, stock = (
        train(Curved(), DataLoader(pairs(48), batch_size=8), *callbacks) for callbacks in ([way.callback(8, 3)], [])
    )
    assert error(ours, stock) <= 1e-12


def test_a_horizon_that_is_the_users_own_says_nothing() -> None:
    """As stock Lightning takes as many steps, whatever the horizon."""

    class Cycled(Task):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 50), "interval": "step"}
            ]

    assert train(Cycled(), whole_batches(), AutoAccumulate(micro_batch_size=3)).told == []


class WarmedUp(Task):
    """The learning rate is set before the optimizer's step, in which the last backward pass of a window runs."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Annealed(torch.optim.SGD):
    """An optimizer that does so itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


class WithAnnealed(Task):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Annealed(self.parameters(), lr=self.lr)


@each_way
@pytest.mark.parametrize("module", [WarmedUp, WithAnnealed])
def test_rates_that_are_set_in_the_optimizers_step_are_as_in_one_pass(module: Any, way: Way) -> None:
    cut_rightly(Case(module, lambda: DataLoader(pairs(48), batch_size=8)), way)


class Multiscale:
    """Every few batches, samples get another size."""

    calls = 0

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        scale = 1 + self.calls // self.every % 3
        return scale * torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@each_cut
@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_collate_function_that_counts_its_batches_is_told(every: int, way: Way) -> None:
    case = Case(Task, lambda: DataLoader(pairs(96), batch_size=8, collate_fn=Multiscale(every)))
    if way.mode == "step":
        cut_rightly(case, way)
        return
    ours = run(case, way)
    assert error(ours, one_pass(case)) > 0.01
    assert ours.cause == "stateful"
    assert "collate function" in ours.told[0]


def test_a_count_that_does_not_matter_is_not_told() -> None:
    cut_rightly(Case(Task, lambda: DataLoader(pairs(24), batch_size=8, collate_fn=Multiscale(1000))), LOADER)


class Replayed(IterableDataset):
    """Samples of a replay buffer."""

    def __init__(self, buffer: deque[Any]) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        return (self.buffer[number * 7 % len(self.buffer)] for number in range(40))


class Playing(Task):
    """Each step adds a sample to the buffer, which the data may read."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.buffer, self.is_read = deque(pairs(20), maxlen=20), is_read

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.buffer.append((batch[0][0] + 1, batch[1][0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Replayed(self.buffer if self.is_read else deque(self.buffer)), batch_size=8)


@each_cut
@pytest.mark.parametrize("is_read", [True, False])
def test_a_replay_buffer_that_steps_fill_is_told(is_read: bool, way: Way) -> None:
    """Parts of a batch fill it faster than one pass."""
    ours, stock = run(Case(lambda: Playing(is_read), lambda: None), way), train(Playing(is_read), None)
    assert (error(ours, stock) > 0.01) == is_read
    assert ours.cause == ("stateful" if is_read else "exact")
    assert len(ours.told) == is_read


class Lazy(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


@each_cut
def test_lazy_modules_are_refused_with_a_way_out_that_works(way: Way) -> None:
    case = Case(Lazy, whole_batches)
    with pytest.raises(UserError, match="lazy module.*verify=False"):
        run(case, way)
    torch.manual_seed(3)
    ours = run(case, way, arguments={"verify": False})
    torch.manual_seed(3)
    assert error(ours, train(Lazy(), whole_batches())) <= 1e-12


class Recalling(Task):
    """The gradient of the last step, kept where the loop zeroes it, pulls the next loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.net[2].weight.grad
        self.last = self.last if gradient is None else gradient.clone()

    def loss(self, batch: Any) -> torch.Tensor:
        pull = 0.0 if self.last is None else 0.1 * (self.last * self.net[2].weight).sum()
        return super().loss(batch) + pull


def test_what_is_kept_where_gradients_are_zeroed_is_told_in_the_loader() -> None:
    """That hook runs after the forward pass of a window's first micro-batch: the others meet what it keeps."""
    loader, stock = DataLoader(pairs(40), batch_size=8), train(Recalling(), DataLoader(pairs(40), batch_size=8))
    ours = train(Recalling(), loader, LOADER.callback(8, 3))
    assert error(ours, stock) > 1e-6
    assert len(ours.told) == 1
    ours = train(Recalling(), loader, STEP.callback(8, 3))
    assert error(ours, stock) <= 1e-12 or len(ours.told) == 1


class Planned(Task):
    """A hook at the start counts the batches of the run; a loss's weight, or a learning rate, follows by its steps."""

    def __init__(self, what: str, *, divides: bool = False) -> None:
        super().__init__()
        self.what, self.divides = what, divides

    def plan(self) -> None:
        factor = self.trainer.accumulate_grad_batches if self.divides else 1
        self.total = self.trainer.num_training_batches // factor * self.trainer.max_epochs

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1.0 + self.global_step / self.total if self.what == "loss" else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups if self.what == "rate" else ():
            group["lr"] = self.lr * (1 - self.global_step / self.total)


class AtStart(Planned):
    def on_train_start(self) -> None:
        self.plan()


class AtEpochs(Planned):
    def on_train_epoch_start(self) -> None:
        self.plan()


@pytest.mark.parametrize("kind", [AtStart, AtEpochs])
@pytest.mark.parametrize("what", ["loss", "rate"])
@each_cut
def test_batches_that_are_counted_at_the_start_are_told_in_the_loader(what: str, kind: Any, way: Way) -> None:
    """Micro-batches are counted there; with the factor they tell the same number of steps."""
    stock = train(kind(what), whole_batches())
    ours = train(kind(what), whole_batches(), way.callback(8, 4))
    is_right = error(ours, stock) <= 1e-12
    assert is_right == (way.mode == "step")
    assert len(ours.told) == (not is_right)
    ours = train(kind(what, divides=True), whole_batches(), way.callback(8, 4))
    assert error(ours, stock) <= 1e-12
    assert ours.told == []


class Hardening(Dataset):
    """Its samples are what an attribute says, which hooks set."""

    def __init__(self) -> None:
        self.samples, self.hard = pairs(24), 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        inputs, targets = self.samples[number]
        return inputs * (1 + self.hard), targets


class Curriculum(Task):
    def on_train_batch_end(self, *_: Any) -> None:
        dataset = self.trainer.train_dataloader.dataset
        getattr(dataset, "dataset", dataset).hard += 0.1


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(24))])
def test_what_hooks_set_in_a_dataset_before_training_is_put_back(wrap: Any, mode: str) -> None:
    """Nothing is cut, so the run is the stock run bit for bit."""

    def loader() -> DataLoader[Any]:
        return DataLoader(wrap(Hardening()), batch_size=8)

    ours = train(Curriculum(), loader(), AutoAccumulate(micro_batching=mode))
    assert error(ours, train(Curriculum(), loader())) == 0.0


def left_out(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@each_way
def test_samples_that_are_none_and_left_out_are_not_measured(way: Way) -> None:
    samples = [None if number % 7 == 0 else (inputs, inputs[:2]) for number, (inputs, _) in enumerate(pairs(48))]
    case = Case(lambda: Task(outputs=2), lambda: DataLoader(samples, batch_size=8, collate_fn=left_out))
    cut_rightly(case, way)


class Clipping(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


class Reading(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.norm = sum(parameter.grad.norm() for parameter in module.parameters())


@pytest.mark.parametrize("other", [Clipping, Reading])
@each_cut
def test_a_callback_that_changes_the_gradients_of_micro_batches_is_told(other: type[Callback], way: Way) -> None:
    """In step mode it sees those of the batch; one that reads them changes nothing."""
    ours, stock = train(Task(), whole_batches(), way.callback(8, 4), other()), train(Task(), whole_batches(), other())
    is_right = way.mode == "step" or other is Reading
    assert (error(ours, stock) <= 1e-12) == is_right
    assert len(ours.told) == (not is_right)
