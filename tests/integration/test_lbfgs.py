"""LBFGS evaluates its closure many times a step: each time on the whole window."""

from typing import Any

import pytest
import torch
from pairing import every_pair
from reference import Regression, Samples, cut, fit, loss, network
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.plan.weights import Samples as CountSamples


class Newton(Regression):
    """The reference task under LBFGS."""

    def __init__(self, line_search: str | None) -> None:
        super().__init__()
        self.line_search = line_search

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch[0].device == self.device
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=4, line_search_fn=self.line_search)


def plain_newton(dataset: Samples, windows: list[list[int]], line_search: str | None) -> list[torch.Tensor]:
    """Final weights of a plain loop, each window in one batch."""
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search)
    for window in windows:

        def closure(window: Any = window) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(net, dataset.inputs[window], dataset.targets[window])
            value.backward()
            return value

        optimizer.step(closure)
    return list(net.parameters())


@every_pair(
    micro_batch=[1, 3],
    line_search=[None, "strong_wolfe"],
    normalize={"known in advance": "samples", "counted": CountSamples()},
)
def test_weights_are_those_of_the_whole_batch(micro_batch: int, line_search: str | None, normalize: Any) -> None:
    """With and without a line search, which needs the loss of the whole window; ragged windows too."""
    dataset = Samples(21)
    callback = AutoAccumulate(micro_batch_size=micro_batch, normalize=normalize)
    module, trainer = fit(DataLoader(dataset, batch_size=8), callback, module=Newton(line_search))
    oracle = plain_newton(dataset, cut(range(21), 8) * 2, line_search)
    for ours, theirs in zip(module.net.parameters(), oracle, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert trainer.global_step == 6
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


class OutOfMemoryOnce(Newton):
    """Memory runs out in one of its passes over several samples."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(None)
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise torch.OutOfMemoryError("injected")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out:UserWarning")
@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("fails_at", [1, 3, 4, 6, 10])
def test_an_error_in_any_evaluation_is_survived(fails_at: int, mode: Any) -> None:
    """Whichever micro-batch of the window it meets: each is cut into its own samples."""
    dataset = Samples(21)
    callback = AutoAccumulate(micro_batch_size=3, micro_batching=mode, verify=False)
    module, _ = fit(DataLoader(dataset, batch_size=8), callback, module=OutOfMemoryOnce(fails_at))
    assert callback.oom_events == 1
    oracle = plain_newton(dataset, cut(range(21), 8) * 2, None)
    for ours, theirs in zip(module.net.parameters(), oracle, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("callbacks", [[AutoAccumulate(micro_batch_size=2, verify=False)], []], ids=["ours", "stock"])
def test_batches_of_fewer_samples_than_others_have_micro_batches(callbacks: Any) -> None:
    """Each evaluation leaves out micro-batches without a sample."""
    batches = [[*range(0, 9)], [9], [*range(10, 16)], [16, 17]]
    loader = DataLoader(Samples(18), batch_sampler=batches)
    module, _ = fit(loader, *callbacks, module=Newton(None), max_epochs=1)
    for ours, theirs in zip(module.net.parameters(), plain_newton(Samples(18), batches, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # LBFGS enlarges rounding
