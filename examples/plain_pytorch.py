"""Gradient accumulation in a plain PyTorch loop: find what fits, cut every window, weigh each part.

Run it: ``python examples/plain_pytorch.py``. Another ``--memory-budget`` gives other micro-batches and the
same training. On a GPU it takes the memory that is free, unless a budget is given.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from lightning_ga import find_micro_batch, plan_accumulation


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default=None if on_gpu else "8MiB", help="what a training step may take")
    parser.add_argument("--effective-batch-size", type=int, default=256)
    parser.add_argument("--max-epochs", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu else "cpu")
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
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def backward(chunk: torch.Tensor, window: int) -> float:
        """The share of some samples in the gradient of a window of so many."""
        loss = cross_entropy(model(images[chunk].to(device)), labels[chunk].to(device))  # a mean over the chunk
        (loss * (len(chunk) / window)).backward()
        return loss.item() * len(chunk) / window

    # --- find what fits ---------------------------------------------------------------------------

    def step(samples: int) -> None:
        """A trial: the last micro-batch of a window, as costly as one can be."""
        backward(torch.arange(samples), arguments.effective_batch_size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay alive, as they do between micro-batches

    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    untrained = copy.deepcopy(optimizer.state_dict())

    def reset() -> None:
        """Trials are real training steps on the first samples. Leave ``reset`` out if these may stay.

        It is needed where a run must be the same whatever the probe did: then also put back the state
        of random generators, if the model draws from them (dropout), and of learning-rate schedules.
        """
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(untrained))  # it keeps the tensors that it is given

    found = find_micro_batch(
        step, high=arguments.effective_batch_size, budget=arguments.memory_budget, device=device, reset=reset
    )
    plan = plan_accumulation(arguments.effective_batch_size, micro_batch=found.limit)
    print(f"limit {found.limit} within {found.budget_bytes / 2**20:.1f} MiB, found in {found.steps} steps; {plan}")

    # --- train ------------------------------------------------------------------------------------

    for _ in range(arguments.max_epochs):
        losses = []
        for window in torch.randperm(len(images)).split(arguments.effective_batch_size):
            chunks = plan_accumulation(len(window), micro_batch=found.limit).chunks[0]  # the last window is smaller
            optimizer.zero_grad()
            losses.append(sum(backward(chunk, len(window)) for chunk in window.split(chunks)))
            optimizer.step()
    print(f"loss of the last epoch {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
