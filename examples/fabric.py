"""Gradient accumulation in a Lightning Fabric loop, on one device or several.

Run it: ``python examples/fabric.py``, or on two processes ``python examples/fabric.py --devices 2``. Another
``--memory-budget`` gives other micro-batches and the same training. On a GPU it takes the memory that is free,
unless a budget is given.
"""

import argparse
import copy

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from lightning_ga import find_micro_batch, plan_accumulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--memory-budget", default=None, help="what a training step may take on each device")
    parser.add_argument("--effective-batch-size", type=int, default=256, help="over all devices")
    parser.add_argument("--max-epochs", type=int, default=10)
    arguments = parser.parse_args()

    fabric = Fabric(devices=arguments.devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    ranks, rank = fabric.world_size, fabric.global_rank
    budget = arguments.memory_budget or ("8MiB" if fabric.device.type == "cpu" else None)
    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.GroupNorm(4, 32),
        torch.nn.GELU(),
        torch.nn.Conv2d(32, 64, 3, padding=1, stride=2),
        torch.nn.GroupNorm(8, 64),
        torch.nn.GELU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 16, 10),
    )
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))

    def backward(chunk: torch.Tensor, window: int, *, last: bool) -> float:
        """The share of some samples in the gradient of a window of so many over all ranks."""
        with fabric.no_backward_sync(model, enabled=not last):
            inputs, targets = fabric.to_device((images[chunk], labels[chunk]))
            loss = cross_entropy(model(inputs), targets, reduction="sum")  # or a mean, times len(chunk)
            loss = loss * ranks / window  # gradients are averaged over ranks
            fabric.backward(loss)
        return loss.item()

    # --- find what fits ---------------------------------------------------------------------------

    share = -(-arguments.effective_batch_size // ranks)

    def step(samples: int) -> None:
        """A trial: the last micro-batch of a window. Ranks do not wait for each other: one may run out of memory."""
        backward(torch.arange(samples), arguments.effective_batch_size, last=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay alive, as they do between micro-batches

    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    untrained = copy.deepcopy(optimizer.state_dict())

    def reset() -> None:
        """Trials are real training steps, on each rank by itself: without this, ranks would differ afterwards."""
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(untrained))  # it keeps the tensors that it is given

    def agree(fits: bool) -> bool:
        """Whether it fits on every rank."""
        return bool(fabric.all_reduce(torch.tensor(float(fits), device=fabric.device), reduce_op="sum") == ranks)

    found = find_micro_batch(step, high=share, budget=budget, device=fabric.device, reset=reset, agree=agree)
    plan = plan_accumulation(arguments.effective_batch_size, micro_batch=found.limit, world_size=ranks)
    fabric.print(
        f"limit {found.limit} within {found.budget_bytes / 2**20:.1f} MiB, found in {found.steps} steps; {plan}"
    )

    # --- train ------------------------------------------------------------------------------------

    for _ in range(arguments.max_epochs):
        losses = []
        for window in torch.randperm(len(images)).split(arguments.effective_batch_size):  # the same on every rank
            if len(window) < ranks:
                break  # the last one is smaller
            cut = plan_accumulation(len(window), micro_batch=found.limit, world_size=ranks)
            mine = window.split([sum(chunks) for chunks in cut.chunks])[rank].split(cut.chunks[rank])
            optimizer.zero_grad()
            loss = sum(backward(chunk, len(window), last=chunk is mine[-1]) for chunk in mine)
            optimizer.step()
            losses.append(float(fabric.all_reduce(torch.tensor(loss, device=fabric.device), reduce_op="mean")))
    fabric.print(f"loss of the last epoch {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
