"""State of optimizers that are only seen to step."""

import torch
from torch import nn

from lightning_ga.probe.training import ProbedTraining


def stepped() -> tuple[nn.Module, torch.optim.Optimizer, ProbedTraining]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    seen = ProbedTraining()
    seen.note(optimizer)
    return model, optimizer, seen


def test_state_that_a_reset_dropped_is_lent_and_nothing_is_kept() -> None:
    model, optimizer, seen = stepped()
    averages = optimizer.state[model.weight]["exp_avg"]
    seen.put_back()
    optimizer.state.clear()
    optimizer.state[model.bias] = {"mine": 1}
    seen.lend()
    assert optimizer.state[model.weight]["exp_avg"] is averages
    assert optimizer.state[model.bias] == {"mine": 1}, "what a reset left stays"
    optimizer.state.clear()
    seen.lend()
    assert not optimizer.state


def test_gradients_are_there_after_a_failed_step_as_they_were_before() -> None:
    model, optimizer, seen = stepped()
    graded = seen.graded()
    optimizer.zero_grad()
    seen.put_back(graded)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    empty = seen.graded()
    model(torch.ones(1, 4)).sum().backward()
    seen.put_back(empty)
    assert all(parameter.grad is None for parameter in model.parameters())
