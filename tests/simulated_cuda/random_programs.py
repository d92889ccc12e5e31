"""Training programs that chance writes, and errors at operators of their passes that chance picks."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import simulated_values
import timm.optim
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from reference import quiet_trainer
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

WIDTH, WORDS = 8, 11


class Program(NamedTuple):
    """What chance has chosen of a training. Its numbers are of 64 bits, which autocast leaves alone."""

    seed: int
    model: str
    norm: str
    precision: Any
    optimizer: str
    groups: int
    clip: str | None
    schedule: str
    container: str
    checkpointed: str
    tied: bool
    normed: bool  # weights by ``weight_norm``
    keeps: str  # state of the step's own
    toggled: bool  # parts of the model are trained by turns
    averaged: bool  # weights are, by a callback
    overflows: bool  # one sample of the data, so that a gradient scaler skips a step
    samples: int
    effective: int
    micro_batch: int
    mode: Any
    unequal: bool  # batches of a batch sampler, such as those of a budget of tokens


def draw(seed: int) -> Program:
    """Choose a program; the same for the same seed."""
    chance = random.Random(seed)
    pick, may = chance.choice, lambda: chance.random() < 0.3
    effective = pick((6, 7, 8, 12))
    precision = pick(("32-true", "16-mixed", "bf16-mixed"))
    optimizer = pick((*OPTIMIZERS, "lamb", "madgrad"))
    checkpointed = pick(("no", "no", "reentrant", "not reentrant"))
    return Program(
        seed=seed,
        model=pick(("linear", "convolution", "attention", "lstm")),
        norm=pick(("none", "layer", "group")),
        precision=precision,
        optimizer=optimizer,
        groups=pick((1, 2, 3)),
        clip=None if optimizer == "fused" else pick((None, "norm", "value")),
        schedule=pick(("none", "step", "epoch", "plateau")),
        container=pick(("tuple", "dict", "list")),
        checkpointed=checkpointed,
        tied=may(),
        normed=may(),
        keeps=pick(("nothing", "buffer", "tuple", "none")),
        toggled=may() and checkpointed != "reentrant",  # which trains nothing behind inputs without gradients
        averaged=may(),
        overflows=precision == "16-mixed" and may(),
        samples=effective * pick((2, 3)) + pick((0, 1, 3)),
        effective=effective,
        micro_batch=pick((2, 3, effective, effective)),
        mode=pick(("loader", "step")),
        unequal=pick((True, False)),
    )


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "lists": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "capturable": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), capturable=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


class Samples(torch.utils.data.Dataset):
    """Vectors, pictures or sequences of unequal length; sample i is a function of seed and i."""

    def __init__(self, program: Program) -> None:
        generator = torch.Generator().manual_seed(program.seed)
        shape = {"linear": (WIDTH,), "convolution": (WIDTH, 4, 4)}.get(program.model)
        self.targets = torch.randn(program.samples, 3, generator=generator, dtype=torch.float64)
        self.inputs: Sequence[torch.Tensor]
        if shape is not None:
            self.inputs = torch.randn(program.samples, *shape, generator=generator, dtype=torch.float64)
        else:
            lengths = torch.randint(2, 6, (program.samples,), generator=generator).tolist()
            self.inputs = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
        self.overflowing = program.samples // 2 if program.overflows else -1

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int, float]:
        return self.inputs[index], self.targets[index], index, float("inf") if index == self.overflowing else 1.0


class Unequal(torch.utils.data.Sampler[list[int]]):
    """Batches of one sample up to as many as a program's others have."""

    def __init__(self, samples: int, most: int) -> None:
        self.batches, start = [], 0
        while start < samples:
            stop = min(start + (most, 1, most - 2)[len(self.batches) % 3], samples)
            self.batches.append([*range(start, stop)])
            start = stop

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Collate:
    """Batches of one of several structures, with names and ``None`` in some."""

    def __init__(self, container: str) -> None:
        self.container = container

    def __call__(self, samples: Sequence[Any]) -> Any:
        inputs, targets, indices, scales = zip(*samples)
        joined = pad_sequence(inputs, batch_first=True) if inputs[0].dim() == 1 else torch.stack(inputs)
        parts = joined, torch.stack(targets), torch.tensor(indices), torch.tensor(scales, dtype=torch.float64)
        if self.container == "dict":
            return {"inputs": parts[0], "others": parts[1:], "names": [str(index) for index in indices], "none": None}
        return parts if self.container == "tuple" else [*parts]


def parts_of(batch: Any) -> tuple[torch.Tensor, ...]:
    """Inputs, targets, indices and scales of a batch."""
    return (batch["inputs"], *batch["others"]) if isinstance(batch, dict) else tuple(batch)


class Net(nn.Module):
    """A small network with residual blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        kind, changed = program.model, weight_norm if program.normed else lambda layer: layer
        layer = partial(nn.Conv2d, kernel_size=3, padding=1) if kind == "convolution" else nn.Linear
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0) if kind in ("attention", "lstm") else None
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True) if kind == "lstm" else None
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True) if kind == "attention" else None
        first = changed(layer(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(inner, normalization(program), nn.GELU())
            for inner in (first, first if program.tied else layer(WIDTH, WIDTH))
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, held = (inputs if self.embedding is None else self.embedding(inputs)), inputs != 0
        if self.lstm is not None:
            hidden = self.lstm(hidden)[0]
        if self.attention is not None:
            hidden = hidden + self.attention(hidden, hidden, hidden, key_padding_mask=~held, need_weights=False)[0]
        if self.embedding is not None:
            hidden = (hidden * held[..., None]).sum(1) / held.sum(1, keepdim=True)
        how = self.program.checkpointed
        for block in self.blocks:
            passed = block(hidden) if how == "no" else checkpoint(block, hidden, use_reentrant=how == "reentrant")
            hidden = hidden + passed
        return self.head(hidden.mean((2, 3)) if hidden.dim() == 4 else hidden)


def normalization(program: Program) -> nn.Module:
    """A layer that treats samples apart."""
    groups = {"none": 0, "layer": 1, "group": 2}[program.norm]
    return nn.GroupNorm(groups, WIDTH) if groups else nn.Identity()


class Trained(pl.LightningModule):
    """Trains the network, and keeps the samples of every step."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program, self.net = program, Net(program).double()
        self.windows: dict[int, list[int]] = {}
        self.register_buffer("seen", torch.zeros(()) if program.keeps == "buffer" else None)
        self.state = (torch.zeros(1), torch.ones(1)) if program.keeps == "tuple" else None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.program.toggled:
            self.net.blocks[0].requires_grad_(self.global_step % 2 == 0)
            self.net.head.requires_grad_(self.global_step % 2 == 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, indices, scales = parts_of(batch)
        assert inputs.device == targets.device == self.device  # which the simulated device's operators do not look at
        self.keep(len(indices))
        loss = (self.net(inputs) * scales[:, None] - targets).abs().mean()
        self.log("largest", indices.double().max(), on_step=False, on_epoch=True, reduce_fx="max")
        if not self.program.overflows:
            self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(indices))
        self.note(indices)
        return loss

    def keep(self, samples: int) -> None:
        """Count samples where a failed pass has to be forgotten."""
        if self.seen is not None:
            self.seen += samples
        elif self.program.keeps != "nothing":
            before = 0 if self.state is None else self.state[0]
            self.state = (before + torch.full((1,), float(samples)), torch.ones(1))

    def note(self, indices: torch.Tensor) -> None:
        """Keep the samples of a pass, once each."""
        window = self.windows.setdefault(self.global_step, [])
        window.extend(index for index in indices.tolist() if index not in window)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, *_ = parts_of(batch)
        self.log("val_loss", (self.net(inputs) - targets).square().mean(), batch_size=len(targets))

    def configure_optimizers(self) -> Any:
        program, weights = self.program, [*self.parameters()]
        groups = [{"params": weights[first :: program.groups]} for first in range(program.groups)]
        if program.optimizer in OPTIMIZERS:
            optimizer = OPTIMIZERS[program.optimizer](groups)
        else:
            optimizer = timm.optim.create_optimizer_v2(groups, program.optimizer, lr=0.01)
        rates = torch.optim.lr_scheduler
        if program.schedule == "none":
            return optimizer
        if program.schedule == "plateau":
            chosen = rates.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chosen, "monitor": "val_loss"}}
        chosen = rates.LambdaLR(optimizer, lambda number: 0.9**number)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chosen, "interval": program.schedule}}


class Failing(pl.Callback):
    """Lets memory run out at an operator of some passes of several samples, and once in validation."""

    def __init__(self, seed: int | None) -> None:
        self.chance = None if seed is None else random.Random(seed)
        self.validated = False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        note = type(module).training_step

        def step(batch: Any, batch_idx: int) -> Any:
            self.arm(len(parts_of(batch)[1]), 100)
            return note(module, batch, batch_idx)

        vars(module)["training_step"] = step

    def on_after_backward(self, *_: Any) -> None:
        simulated_values.fail_at(set())

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        if not self.validated:
            self.validated = self.arm(len(parts_of(batch)[1]), 10)

    def on_validation_batch_end(self, *_: Any) -> None:
        simulated_values.fail_at(set())

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        vars(module).pop("training_step", None)

    def arm(self, samples: int, operators: int) -> bool:
        """Choose an operator to fail, or none; a single sample cannot be cut. Return whether one will."""
        fails = self.chance is not None and samples > 1 and self.chance.random() < 0.4
        simulated_values.fail_at({self.chance.randint(1, operators)} if fails else set())
        return fails


@contextmanager
def no_failures() -> Iterator[None]:
    """A context after which no operator is left to fail."""
    try:
        yield
    finally:
        simulated_values.fail_at(set())


def train(program: Program, *callbacks: pl.Callback) -> dict[str, Any]:
    """What is left of a training: model, optimizer and scaler, what was logged, the samples of steps."""
    averaging = [EMAWeightAveraging(decay=0.8)] if program.averaged else []
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": program.clip} if program.clip else {}
    trainer = quiet_trainer(*callbacks, *averaging, accelerator="gpu", precision=program.precision, **clipping)
    pl.seed_everything(program.seed, verbose=False)
    module, collate = Trained(program), Collate(program.container)
    loader, val_loader = (
        DataLoader(Samples(program._replace(samples=samples)), batch_size=batch, collate_fn=collate)
        for samples, batch in ((program.samples, program.effective), (7, 4))
    )
    if program.unequal:
        batches = Unequal(program.samples, program.effective)
        loader = DataLoader(loader.dataset, batch_sampler=batches, collate_fn=collate)
    with no_failures():
        trainer.fit(module, loader, val_loader)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "weights": module.state_dict(),
        "state": module.state,
        "optimizer": trainer.optimizers[0].state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "logged": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
        "windows": {step: sorted(window) for step, window in module.windows.items()},
    }
