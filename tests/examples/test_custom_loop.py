"""The loop by hand: killed and gone on with, cut in any way, it is the same training."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked, in_turn
from lightning.fabric import Fabric

from examples.custom_loop import Config, Training, train
from examples.reproduce import custom_loop as recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]
CONFIG = Config(effective_batch_size=12, micro_batch_size=5, steps=7, checkpoint_every=2, rows=500)
SAMPLES = 31


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(SAMPLES, 1, 9, 9, generator=generator), torch.arange(SAMPLES) % 10


def live(folder: str, with_fabric: bool, dies_at: int | None) -> None:
    """Train, until the process kills itself between two checkpoints."""

    def watch(training: Training, chunks: Any) -> None:
        if training.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    fabric = Fabric(accelerator="cpu", devices=1) if with_fabric else None
    training = train(replace(CONFIG, folder=folder), *images(), fabric=fabric, watch=watch)
    torch.save(training.model.state_dict(), Path(folder) / "weights.pt")


def test_killed_and_resumed_is_uninterrupted_to_the_bit(tmp_path: Path) -> None:
    """Weights, and the summaries: each step once; with Fabric as without."""
    killed = ((str(tmp_path / "killed"), True, 3), -signal.SIGKILL)
    done = forked(in_turn, live, [killed, ((str(tmp_path / "killed"), True, None), 0)], folder=tmp_path)
    assert done.code == 0, done.output
    (tmp_path / "through").mkdir()
    live(str(tmp_path / "through"), False, None)
    through, killed = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("through", "killed"))
    assert [name for name in through if not through[name].equal(killed[name])] == []
    curves = [recipe.summarized(tmp_path / name) for name in ("through", "killed")]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [*range(1, 8)]


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    """Ragged windows too; each gradient stays sparse and names a row once."""
    trained = []
    for micro_batch in (12, 5):
        used: list[int] = []

        def watch(training: Training, chunks: tuple[torch.Tensor, ...]) -> None:
            used.append(sum(map(len, chunks)))  # noqa: B023 (called in this round only)
            gradient = next(training.model.parameters()).grad
            assert gradient.is_sparse
            assert gradient.is_coalesced()

        config = replace(CONFIG, micro_batch_size=micro_batch, folder=str(tmp_path / str(micro_batch)))
        trained.append(train(config, *images(), watch=watch))
        assert used == [12, 12, 7, 12, 12, 7, 12]
    for whole, cut in zip(trained[0].model.parameters(), trained[1].model.parameters()):
        torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-5)


OVERRIDES = ["experiment=sparse_embedding", "data=digits", "data.val_fraction=0.8"]  # 287 images to train on


def test_the_usual_loop_loses_the_ragged_window(tmp_path: Path) -> None:
    usual = recipe.usual(tmp_path, OVERRIDES, epochs=2, limit=2)
    ours = recipe.by_loop(tmp_path, OVERRIDES, epochs=2, limit=2, config=Config(micro_batch_size=64))
    assert (usual.values["used"], ours.values["used"]) == (256, 287)
    assert (usual.values["steps"], ours.values["steps"]) == (2, 4)
    assert ours.values["error"] < 1e-6
    assert ours.values["gradient"] < usual.values["gradient"]
