"""Log values of the package's own at an optimizer step.

Tested in tests/integration/test_schedules.py.
"""

from collections.abc import Mapping
from typing import Any


def log_step(trainer: Any, values: Mapping[str, Any]) -> None:
    """Log values of the current optimizer step, as often as ``log_every_n_steps`` says; leave out ``None``."""
    if not values or not trainer._logger_connector.should_update_logs:
        return
    known = {name: float(value) for name, value in values.items() if value is not None}
    for logger in trainer.loggers:
        logger.log_metrics(known.copy(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
