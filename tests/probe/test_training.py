"""Trainings whose optimizers are only seen to step."""

import torch
from torch import nn

from lightning_ga.probe.training import ProbedTraining


def test_gradients_are_there_after_a_failed_step_as_they_were_before() -> None:
    """That the state of optimizers is, too, shows in the limits of ``integration/test_probe.py``."""
    model, seen = nn.Linear(4, 2), ProbedTraining()
    optimizer = torch.optim.Adam(model.parameters())
    seen.note(optimizer)
    for has_gradients in (False, True):
        graded = seen.graded()
        optimizer.zero_grad() if has_gradients else model(torch.ones(1, 4)).sum().backward()
        seen.put_back(graded)
        assert all((parameter.grad is not None) == has_gradients for parameter in model.parameters())
        model(torch.ones(1, 4)).sum().backward()
