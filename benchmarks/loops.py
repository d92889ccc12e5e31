"""One training program for each framework, as its own pages say; each is audited in an environment of its own.

``python -m benchmarks.loops NAME`` prints what ``benchmarks.frameworks`` writes to its records. A program trains
``task.model`` on ``task.loader()`` for two epochs, of micro-batches of four samples, four of them a window.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name PyTorch users know)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ga import audited_steps, audited_weights
from lightning_ga.audit import Audit, audit

FACTOR, BATCH, EPOCHS, FEATURES, LR = 4, 4, 2, 12, 0.25
TAIL = 42  # samples: eleven micro-batches, of which three are left for the last window, and the last one has two
UNEQUAL = 14  # samples: one window, whose last micro-batch has two
WHOLE = 32  # samples: two windows
MAX_NORM = 0.5


@dataclass
class Task:
    """What a program trains, and what it leaves behind."""

    samples: int
    max_norm: float | None = None
    schedules: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inputs, self.targets = torch.randn(self.samples, FEATURES), torch.randn(self.samples, 1)

    def loader(self, **settings: Any) -> Any:
        return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=BATCH, **settings)

    def optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=LR)

    def schedule(self, optimizer: Any) -> Any:
        """A schedule whose steps are counted."""
        self.schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
        return self.schedules[-1]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [*zip(self.inputs.split(BATCH), self.targets.split(BATCH))]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


Program = Callable[[Task], object]


def audited(program: Program, samples: int, max_norm: float | None = None) -> tuple[Audit, Task]:
    task = Task(samples, max_norm)
    run = partial(program, task)
    return audit(run, model=task.model, micro_batches=task.batches(), loss=loss_of, factor=FACTOR), task


# PyTorch: audited by hooks.


def lightning(task: Task) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer()
            return [optimizer], [{"scheduler": task.schedule(optimizer), "interval": "step"}]

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": EPOCHS}
    pl.Trainer(accumulate_grad_batches=FACTOR, gradient_clip_val=task.max_norm, **quiet).fit(Module(), task.loader())


def fabric(task: Task) -> None:
    """The loop of Fabric's guide to gradient accumulation."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(task.model, task.optimizer())
    loader = fabric.setup_dataloaders(task.loader())
    for _ in range(EPOCHS):
        for iteration, batch in enumerate(loader):
            is_accumulating = iteration % FACTOR != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(loss_of(model, batch))
            if not is_accumulating:
                if task.max_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=task.max_norm)
                optimizer.step()
                optimizer.zero_grad()


def accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=FACTOR, cpu=True)
    inner = task.optimizer()
    model, optimizer, loader, schedule = accelerator.prepare(task.model, inner, task.loader(), task.schedule(inner))
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if task.max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


class Rows(torch.utils.data.Dataset[Any]):
    """Rows as mappings."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return self.task.samples

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.task.inputs[index], "labels": self.task.targets[index]}


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, task: Task) -> None:
        self.rows = Rows(task)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


def transformers(task: Task, dataset: Any = Rows) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            return {"loss": loss_of(self.net, (inputs, labels))}

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    windows = (task.samples + FACTOR * BATCH - 1) // (FACTOR * BATCH)
    optimizer = task.optimizer()
    settings: dict[str, Any] = {"num_train_epochs": EPOCHS} if dataset is Rows else {"max_steps": EPOCHS * windows}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=FACTOR,
        max_grad_norm=task.max_norm or 0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    trainer = InOrder if dataset is Rows else Trainer
    optimizers = (optimizer, task.schedule(optimizer))
    trainer(Model(), arguments, train_dataset=dataset(task), optimizers=optimizers).train()


def composer(task: Task) -> None:
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch[0])  # type: ignore[no-any-return]

        def loss(self, outputs: Tensor, batch: Any, *_: Any) -> Tensor:
            return F.mse_loss(outputs, batch[1])

    clipping = [] if task.max_norm is None else [GradientClipping("norm", task.max_norm)]
    loader = DataLoader(TensorDataset(task.inputs, task.targets), batch_size=FACTOR * BATCH)
    Trainer(
        model=Model(),
        train_dataloader=loader,
        optimizers=task.optimizer(),
        max_duration=f"{EPOCHS}ep",
        device="cpu",
        device_train_microbatch_size=BATCH,
        algorithms=clipping,
        progress_bar=False,
    ).fit()


def fastai(task: Task) -> None:
    """Its callback counts samples, not batches."""
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    callbacks = [GradientAccumulation(FACTOR * BATCH)]
    callbacks += [] if task.max_norm is None else [GradientClip(task.max_norm)]
    options = {"opt_func": partial(OptimWrapper, opt=torch.optim.SGD), "lr": LR, "train_bn": False, "wd": 0.0}
    learner = Learner(DataLoaders(task.loader(), task.loader()), task.model, F.mse_loss, cbs=callbacks, **options)
    with learner.no_bar(), learner.no_logging():
        learner.fit(EPOCHS)


def ignite(task: Task) -> None:
    from ignite.engine import Events, create_supervised_trainer

    optimizer = task.optimizer()
    trainer = create_supervised_trainer(task.model, optimizer, F.mse_loss, gradient_accumulation_steps=FACTOR)
    schedule = task.schedule(optimizer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
    trainer.run(task.loader(), max_epochs=EPOCHS)


def skorch(task: Task) -> None:
    """The recipe of its FAQ."""
    from skorch import NeuralNet

    class Accumulating(NeuralNet):  # type: ignore[misc]
        acc_steps = FACTOR

        def get_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().get_loss(*args, **kwargs) / self.acc_steps

        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            batches_so_far = len(self.history[-1]["batches"]) if self.history else 0
            step = self.train_step_single(batch, **fit_params)
            if batches_so_far % self.acc_steps == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = Accumulating(task.model, nn.MSELoss, optimizer=torch.optim.SGD, lr=LR, max_epochs=EPOCHS, batch_size=BATCH)
    net.set_params(train_split=None, verbose=0, iterator_train__shuffle=False)
    net.fit(task.inputs, task.targets)


def poutyne(task: Task) -> None:
    from poutyne import Model

    model = Model(task.model, task.optimizer(), F.mse_loss)
    model.fit_generator(task.loader(), epochs=EPOCHS, batches_per_step=FACTOR, verbose=False)


def pytorch_accelerated(task: Task) -> None:
    from pytorch_accelerated import Trainer

    class InOrder(Trainer):  # type: ignore[misc]
        def create_train_dataloader(self, batch_size: int, *_: Any, **__: Any) -> Any:
            return task.loader()

        def create_scheduler(self) -> Any:
            return task.schedule(self.optimizer)

    os.environ["ACCELERATE_USE_CPU"] = "true"
    InOrder(task.model, F.mse_loss, task.optimizer(), callbacks=()).train(
        TensorDataset(task.inputs, task.targets),
        num_epochs=EPOCHS,
        per_device_batch_size=BATCH,
        gradient_accumulation_steps=FACTOR,
        gradient_clip_value=task.max_norm,
        create_scheduler_fn=task.schedule,
    )


def torchtnt(task: Task) -> None:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    class Unit(AutoUnit[Any]):
        def compute_loss(self, state: Any, data: Any) -> Any:
            return loss_of(self.module, data), None

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            optimizer = task.optimizer()
            return optimizer, task.schedule(optimizer)

    unit = Unit(
        module=task.model,
        device=torch.device("cpu"),
        gradient_accumulation_steps=FACTOR,
        step_lr_interval="step",
        clip_grad_norm=task.max_norm,
    )
    train(unit, task.loader(), max_epochs=EPOCHS)


def catalyst(task: Task) -> None:
    from catalyst import dl

    class Runner(dl.Runner):  # type: ignore[misc]
        def handle_batch(self, batch: Any) -> None:
            loss = loss_of(self.model, batch)
            self.batch_metrics = {"loss": loss}
            self.engine.backward(loss)

    callback = dl.OptimizerCallback("loss", accumulation_steps=FACTOR)
    Runner().train(
        model=task.model,
        optimizer=task.optimizer(),
        loaders={"train": task.loader()},
        callbacks=[callback],
        num_epochs=EPOCHS,
        engine=dl.CPUEngine(),
    )


def mmengine(task: Task) -> None:
    """Its loop gives the optimizer's wrapper the number of iterations in advance."""
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def forward(self, inputs: Tensor, targets: Tensor, mode: str = "loss") -> Any:
            return {"loss": loss_of(self.net, (inputs, targets))}

    wrapper = {"optimizer": task.optimizer(), "accumulative_counts": FACTOR}
    wrapper |= {} if task.max_norm is None else {"clip_grad": {"max_norm": task.max_norm}}
    Runner(
        model=Model(),
        work_dir=tempfile.mkdtemp(),
        train_dataloader=task.loader(),
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS},
        optim_wrapper={"type": "OptimWrapper", **wrapper},
        default_hooks={"checkpoint": None, "logger": None},
    ).train()


PYTORCH: dict[str, Program] = {
    each.__name__: each
    for each in (
        *(lightning, fabric, accelerate, transformers, composer, fastai, ignite, skorch, poutyne, pytorch_accelerated),
        *(torchtnt, catalyst, mmengine),
    )
}
PYTORCH["transformers_stream"] = partial(transformers, dataset=Stream)
NO_CLIPPING = ("ignite", "skorch", "poutyne", "catalyst")  # have no setting for it in these programs


# Others: SGD without momentum shows its gradient by the weights before and after. Linear regression in float64.


@dataclass
class Linear:
    """Data of a linear regression, and the weights after each micro-batch."""

    samples: int
    max_norm: float | None = None
    weights: list[Any] = field(default_factory=list)  # from the start on

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(self.samples, FEATURES, dtype=torch.float64).numpy()
        self.targets = torch.randn(self.samples, 1, dtype=torch.float64).numpy()

    def batches(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self.samples, BATCH):
            yield self.inputs[start : start + BATCH], self.targets[start : start + BATCH]

    def note(self, weights: Any) -> None:
        self.weights.append(torch.tensor(weights, dtype=torch.float64).reshape(1, FEATURES))


def audited_by_weights(program: Callable[[Linear], object], samples: int, max_norm: float | None = None) -> Audit:
    """The same audit, of weights that were noted."""
    task = Linear(samples, max_norm)
    program(task)
    model = nn.Linear(FEATURES, 1, bias=False).double()
    recorder = audited_steps.Recorder(model)
    read = 0
    for before, after in zip(task.weights, task.weights[1:]):
        read += 1
        if not torch.equal(before, after):
            gradients = {"weight": (before - after).flatten() / LR}
            recorder.steps.append(audited_steps.Seen(read, before.flatten(), [True], gradients, False))
            read = 0
    batches = [(torch.tensor(inputs), torch.tensor(targets)) for inputs, targets in task.batches()]
    return audited_weights.measured(
        recorder, audited_weights.Reads(batches, loss_of, lambda batch: len(batch[0])), FACTOR
    )


def keras(task: Linear) -> None:
    import keras

    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(LR, gradient_accumulation_steps=FACTOR, global_clipnorm=task.max_norm), "mse")

    class Note(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            if keras.config.backend() == "jax":
                model.jax_state_sync()  # JAX keeps the weights of a fit elsewhere
            task.note(model.get_weights()[0])

    task.note(model.get_weights()[0])
    model.fit(task.inputs, task.targets, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[Note()])


def keras_tensorflow(task: Linear) -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    keras(task)


def keras_jax(task: Linear) -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_ENABLE_X64"] = "1"
    keras(task)


def optax(task: Linear) -> None:
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax
    import optax

    def loss(weights: Any, inputs: Any, targets: Any) -> Any:
        return ((inputs @ weights - targets) ** 2).mean()

    clip = optax.identity() if task.max_norm is None else optax.clip_by_global_norm(task.max_norm)
    optimizer = optax.MultiSteps(optax.chain(clip, optax.sgd(LR)), FACTOR)
    weights = jax.numpy.zeros((FEATURES, 1))
    state = optimizer.init(weights)
    task.note(weights.tolist())
    for _ in range(EPOCHS):
        for inputs, targets in task.batches():
            updates, state = optimizer.update(jax.grad(loss)(weights, inputs, targets), state, weights)
            weights = optax.apply_updates(weights, updates)
            task.note(weights.tolist())


def flax(task: Linear) -> None:
    """``TrainState`` with ``optax.MultiSteps``, as its pages say."""
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax
    import optax
    from flax import nnx

    model = nnx.Linear(FEATURES, 1, use_bias=False, param_dtype=jax.numpy.float64, rngs=nnx.Rngs(0))
    clip = optax.identity() if task.max_norm is None else optax.clip_by_global_norm(task.max_norm)
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.chain(clip, optax.sgd(LR)), FACTOR), wrt=nnx.Param)
    task.note(model.kernel[...].tolist())
    for _ in range(EPOCHS):
        for inputs, targets in task.batches():
            gradients = nnx.grad(lambda net, batch: ((net(batch[0]) - batch[1]) ** 2).mean())(model, (inputs, targets))
            optimizer.update(model, gradients)
            task.note(model.kernel[...].tolist())


def paddle(task: Linear) -> None:
    import paddle

    paddle.set_default_dtype("float64")
    net = paddle.nn.Linear(FEATURES, 1, bias_attr=False)
    clip = None if task.max_norm is None else paddle.nn.ClipGradByGlobalNorm(task.max_norm)

    class Note(paddle.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            task.note(net.weight.tolist())

    class Data(paddle.io.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return task.samples

        def __getitem__(self, index: int) -> Any:
            return task.inputs[index], task.targets[index]

    model = paddle.Model(net)
    optimizer = paddle.optimizer.SGD(LR, parameters=net.parameters(), grad_clip=clip)
    model.prepare(optimizer, paddle.nn.MSELoss())
    task.note(net.weight.tolist())
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "verbose": 0, "shuffle": False}
    model.fit(Data(), accumulate_grad_batches=FACTOR, callbacks=[Note()], **settings)


def deepspeed(task: Linear) -> None:
    """In float32, as its engine reduces no gradients in float64."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29551",
    }
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": FACTOR}
    net = nn.Linear(FEATURES, 1, bias=False)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=LR),
        config={**config, "gradient_clipping": task.max_norm or 0.0},
        dist_init_required=True,
    )
    task.note(net.weight.tolist())
    for _ in range(EPOCHS):
        for batch in task.batches():
            inputs, targets = (torch.tensor(each, dtype=torch.float32) for each in batch)
            engine.backward(F.mse_loss(engine(inputs), targets))
            engine.step()
            task.note(net.weight.tolist())


OTHERS: dict[str, Callable[[Linear], object]] = {
    each.__name__: each for each in (keras_tensorflow, keras_jax, optax, flax, paddle, deepspeed)
}


def record(found: Audit) -> dict[str, Any]:
    """An audit as it is written to JSON."""
    steps = [
        {
            "micro_batches": step.micro_batches,
            "weights": [round(weight, 6) for weight in step.weights],
            "wanted": [round(weight, 6) for weight in step.wanted],
            "residual": step.residual,
            "verdict": step.verdict,
        }
        for step in found.steps
    ]
    return {"is_right": found.is_right, "verdict": found.verdict, "dropped": found.dropped, "steps": steps}


def main(name: str) -> dict[str, Any]:
    """Audit a framework on data with a partial last window, with unequal micro-batches, and with clipping."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    runs: dict[str, tuple[int, float | None]] = {"tail": (TAIL, None), "unequal": (UNEQUAL, None)}
    if name not in NO_CLIPPING:
        runs["clipped"] = (WHOLE, MAX_NORM)
    for run, (samples, max_norm) in runs.items():
        if name in OTHERS:
            found[run] = record(audited_by_weights(OTHERS[name], samples, max_norm))
            continue
        result, task = audited(PYTORCH[name], samples, max_norm)
        found[run] = record(result)
        found[run]["schedule_steps"] = task.schedules[0].last_epoch if task.schedules else None
    return found


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.write_text(json.dumps(main(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # some libraries keep threads alive
