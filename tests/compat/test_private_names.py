"""What is relied on of Lightning's private parts: an upgrade that changes it fails here, by name."""

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ga.compat import closures, dataloaders, patching


@pytest.fixture(params=[pl.Trainer, pytorch_lightning.Trainer], ids=["lightning", "pytorch_lightning"])
def trainer(request: pytest.FixtureRequest) -> Any:
    """A trainer of either namespace."""
    return request.param(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


@pytest.mark.parametrize(
    "path",
    [
        "fit_loop._data_source.dataloader",
        "fit_loop._combined_loader",
        "fit_loop._data_fetcher",
        "fit_loop.max_batches",
        "fit_loop.setup_data",
        "fit_loop._should_accumulate",
        "fit_loop.epoch_progress.current.processed",
        "fit_loop.epoch_loop._results",
        "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop._should_check_val_fx",
        "fit_loop.epoch_loop.on_advance_end",
        "fit_loop.epoch_loop._build_kwargs",
        "fit_loop.epoch_loop.restarted_on_train_batch_end",
        "fit_loop.epoch_loop.restarted_on_last",
        "fit_loop.epoch_loop.batch_progress.is_last_batch",
        "fit_loop.epoch_loop.automatic_optimization.run",
        "fit_loop.epoch_loop.automatic_optimization.optim_progress",
        "fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn",
        "fit_loop.epoch_loop.automatic_optimization._skip_backward",
        "_accelerator_connector.use_distributed_sampler",
        "_logger_connector._first_loop_iter",
        "_logger_connector._current_fx",
        "_logger_connector._progress_bar_metrics",
        "_logger_connector._logged_metrics",
        "_logger_connector._callback_metrics",
        "_loggers",
    ],
)
def test_the_private_name_is_there(trainer: Any, path: str) -> None:
    for name in path.split("."):
        assert hasattr(trainer, name), path
        trainer = getattr(trainer, name)


def test_combined_loaders_have_a_function_for_their_length() -> None:
    modes = pl.utilities.combined_loader._SUPPORTED_MODES
    assert {mode: way["fn"]([2, 3]) for mode, way in modes.items() if mode != "sequential"} == {
        "min_size": 2,
        "max_size_cycle": 3,
        "max_size": 3,
    }


def test_patches_are_taken_back(trainer: Any) -> None:
    """The loop answers with its class's methods again."""
    before = dict(vars(trainer.fit_loop)), dict(vars(trainer.fit_loop._data_source))
    with dataloaders.intercepted_loaders(trainer, cut=lambda loader: loader, around=lambda set_up: set_up()):
        assert "setup_data" in vars(trainer.fit_loop)
    assert (vars(trainer.fit_loop), vars(trainer.fit_loop._data_source)) == before


def test_the_namespace_of_a_trainer_is_found(trainer: Any) -> None:
    root = type(trainer).__module__.split(".trainer")[0]
    assert patching.sibling(trainer, "trainer.call").__name__ == f"{root}.trainer.call"


def test_steps_that_fetch_their_own_batches_are_known() -> None:
    """By the name that Lightning looks for."""

    class Fetching(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:
            return None

    assert closures.takes_an_iterator(Fetching())
    assert not closures.takes_an_iterator(BoringModel())
