"""A training loop by hand: averaged gradients, a config, summaries by step, checkpoints, a start step.

Run it: ``python examples/custom_loop.py``, with Lightning Fabric ``python examples/custom_loop.py --fabric``. End
it at any time and run it again: it resumes from its last checkpoint, and ends with the same weights to the bit. Another
``--memory-budget`` gives other micro-batches and the same training. ``tensorboard --logdir outputs/custom_loop``
shows the summaries.

The model is an embedding of 200,000 × 64 for the patches of a picture. A window touches few of its rows, so its
gradient is sparse, and stays so while it accumulates.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from torch.utils.tensorboard import SummaryWriter

from lightning_ga import find_micro_batch, plan_accumulation
from lightning_ga.data import Digits
from lightning_ga.models import HashedPatchClassifier


@dataclass(frozen=True)
class Config:
    """All that a run hangs on."""

    effective_batch_size: int = 256
    micro_batch_size: int = 0  # 0: what fits
    memory_budget: str = "112MiB"  # what a training step may take, weights included
    learning_rate: float = 0.1
    steps: int = 60  # of the optimizer
    checkpoint_every: int = 10  # of these
    seed: int = 0
    rows: int = 200_000  # of the embedding
    sparse: bool = True
    folder: str = "outputs/custom_loop"


@dataclass
class Training:
    """What a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0  # optimizer steps that are done

    def save(self, path: Path) -> None:
        """Whenever the process is killed, there is a whole checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


Watch = Callable[[Training, tuple[Tensor, ...]], object]
Backward = Callable[[Tensor, int], float]


def train(
    config: Config, images: Tensor, labels: Tensor, *, fabric: Fabric | None = None, watch: Watch | None = None
) -> Training:
    """Train up to ``config.steps``, from the checkpoint in ``config.folder`` if there is one.

    Args:
        config: The run.
        images: All training images.
        labels: Their classes.
        fabric: Moves and runs the model, if given.
        watch: Called before every optimizer step with the training and the samples of each micro-batch.
    """
    torch.manual_seed(config.seed)
    model: nn.Module = HashedPatchClassifier(config.rows, sparse=config.sparse).net
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=config.learning_rate)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
    run_backward = Tensor.backward if fabric is None else fabric.backward
    training = Training(model, optimizer)

    def backward(chunk: Tensor, window: int) -> float:
        """Add the share of some samples to the mean gradient of a window of so many."""
        loss = cross_entropy(model(images[chunk]), labels[chunk]) * (len(chunk) / window)
        run_backward(loss)
        coalesce(model)
        return loss.item()

    micro_batch = config.micro_batch_size or what_fits(training, backward, config, len(images))
    checkpoint = Path(config.folder) / "last.pt"
    if checkpoint.exists():
        training.load(checkpoint)
    with SummaryWriter(config.folder, purge_step=training.step + 1) as summaries:  # steps to be done again are dropped
        for window in windows(len(images), config, start=training.step):
            chunks = plan_accumulation(len(window), micro_batch=micro_batch).chunks[0]  # an epoch's last is smaller
            optimizer.zero_grad()
            loss = sum(backward(chunk, len(window)) for chunk in window.split(chunks))
            if watch is not None:
                watch(training, window.split(chunks))
            optimizer.step()
            training.step += 1
            summaries.add_scalar("loss", loss, training.step)
            if training.step % config.checkpoint_every == 0 or training.step == config.steps:
                training.save(checkpoint)
    return training


def coalesce(model: nn.Module) -> None:
    """Let sparse gradients name each row once: left alone, every micro-batch adds its rows again."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def windows(samples: int, config: Config, *, start: int) -> Iterator[Tensor]:
    """The samples of each optimizer step, from a start step on: a function of the seed, whatever ran before."""
    per_epoch = -(-samples // config.effective_batch_size)
    for step in range(start, config.steps):
        epoch, window = divmod(step, per_epoch)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(config.seed + epoch))
        yield order.split(config.effective_batch_size)[window]


def what_fits(training: Training, backward: Backward, config: Config, samples: int) -> int:
    """Find the largest micro-batch within the budget; weights and optimizer are put back."""
    model, optimizer = training.model, training.optimizer
    parameters = list(model.parameters())
    window = torch.arange(min(samples, config.effective_batch_size))
    for chunk in window.split(8):
        backward(chunk, len(window))
    accumulated = [parameter.grad for parameter in parameters]

    def step(size: int) -> None:
        """A trial is the last micro-batch of a window: the gradient of the others is alive."""
        for parameter, gradient in zip(parameters, accumulated):
            parameter.grad = gradient.clone()
        backward(window[:size], len(window))
        optimizer.step()

    weights, untrained = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def reset() -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(untrained))  # it keeps the tensors that it is given

    found = find_micro_batch(step, high=len(window), budget=config.memory_budget, device="cpu", reset=reset)
    optimizer.zero_grad()
    return found.limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        read = field.type if field.type is not bool else argparse.BooleanOptionalAction
        how = {"action": read} if field.type is bool else {"type": read}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **how)
    parser.add_argument("--fabric", action="store_true", help="let Lightning Fabric run the model")
    options = vars(parser.parse_args())
    fabric = Fabric(accelerator="cpu", devices=1) if options.pop("fabric") else None
    data = Digits(image_size=28, mean=0.0, std=1.0)
    data.setup("fit")
    images, labels = default_collate(list(data.train_dataloader().dataset))
    training = train(Config(**options), images, labels, fabric=fabric)
    with torch.no_grad():
        right = training.model(images).argmax(dim=1) == labels
    print(f"{training.step} optimizer steps; training accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
