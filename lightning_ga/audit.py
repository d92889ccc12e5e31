"""Measure with which weight each micro-batch reached the optimizer, in a loop that is written in anything.

``python -m lightning_ga.audit script.py`` does so for a script; its exit code is 1 if a weight is wrong.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_ga.audited_script import audit_script
from lightning_ga.audited_steps import Recorder
from lightning_ga.audited_weights import Reads, measured
from lightning_ga.batch.layout import Samples
from lightning_ga.double_precision import Promotion, in_double
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.audit_verdicts import Audit, AuditStep

__all__ = ["Audit", "AuditStep", "audit"]


def audit(
    train: Callable[[], object],
    *,
    model: torch.nn.Module,
    micro_batches: Iterable[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    factor: int | None = None,
    sizes: Callable[[Any], float] | None = None,
) -> Audit:
    """Run a training loop, and measure the weight of each micro-batch in the gradient of each optimizer step.

    For the time of the audit the model is in float64 and without dropout; afterwards it is as it was before. The
    gradients of single micro-batches are computed after training, at the weights of each step. On several ranks, each
    rank calls this with the micro-batches of all of them: the first of every rank, then the second of every rank.

    Args:
        train: Runs the loop on ``model``, with optimizers of ``torch.optim`` that it makes itself.
        model: Has all the parameters that the optimizer steps.
        micro_batches: Batches of one epoch, in the order in which the loop reads them. A loop of several epochs reads
            them again; if their order changes, list those of all epochs.
        loss: Called with the model and a micro-batch; returns its mean loss.
        factor: Micro-batches (on a rank) of a whole window; read off if ``None``.
        sizes: Called with a micro-batch; returns how many items its loss is a mean over, as ``TargetTokens()`` does.
            ``None`` for its samples, the length of its first tensor.

    Raises:
        UserError: If the weights cannot be known: fewer independent gradients than micro-batches, another order of
            them, parameters that are not the model's, an optimizer that steps within the backward pass.

    Examples:
        >>> model = torch.nn.Linear(9, 1)
        >>> batches = [torch.randn(4, 9) for _ in range(3)]
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> def train():
        ...     optimizer = torch.optim.SGD(model.parameters())
        ...     for index, batch in enumerate(batches, start=1):
        ...         (loss(model, batch) / 2).backward()
        ...         if index % 2 == 0 or index == len(batches):
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> print(audit(train, model=model, micro_batches=batches, loss=loss))
        step  micro-batches  weight of each  wanted   verdict
        1     1-2            0.5 0.5         0.5 0.5  right
        2     3              0.5             1        the window is divided by the factor, 2
    """
    reads = Reads([*micro_batches], loss, sizes or Samples())
    with in_double(model):
        with Promotion(), Recorder(model).watching() as recorder:
            train()
        return measured(recorder, reads, factor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a script, print its table, and return 1 if a weight is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ga.audit", description=__doc__)
    parser.add_argument(
        "--micro-batches", type=int, default=32, help="the most to train on, but for two windows; default: 32"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    if not given.script.is_file():
        raise UserError(f"{given.script} is no file: give a script, as in python -m lightning_ga.audit train.py.")
    found = audit_script(given.script, given.arguments, most=given.micro_batches)
    print(f"{found}\n{'right' if found.is_right else 'WRONG'}: {found.verdict}")
    return int(not found.is_right)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
