"""What of a record has to be the same as without the callback, in each kind of mode."""

from typing import Any

from recorder import Event, Record
from scenarios import Mode

BY_PIECE = {"training_step", "on_before_backward"}
BY_BATCH = {"on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "on_after_batch_transfer"}
BY_BATCH |= {"on_after_backward", "transfer_batch_to_device"}
COUNTS_OF_BATCHES = {"batches", "training_batches", "is_last_batch", "factor"}


def view(record: Record, mode: Mode) -> dict[str, Any]:
    """All of it where nothing is cut; where batches are cut, what does not depend on how often steps are called."""
    if not mode.cut:
        return {name: part for name, part in record.items() if name != "read"}
    in_step = mode.micro_batching == "step"
    return {
        "ends": [_end(end, in_step) for end in record["ends"]],
        "events": _events(record["events"], in_step),
        "metrics": record["metrics"] if in_step else [],
        "batches": record["batches"] if in_step else [],
        "rates": record["rates"] if in_step else [],
        "rates_of_steps": record["rates_of_steps"],
        "steps_of_validations": record["steps_of_validations"],
        "rows": [(step, _by_epoch(values, in_step)) for step, values in record["rows"]],
        "warnings": record["warnings"],
        "messages": record["messages"],
        "checkpoints": {name: _checkpoint(content, in_step) for name, content in record["checkpoints"].items()},
        "files": sorted(record["files"]),
        "notes": record["notes"],
    }


def outcome(record: Record) -> dict[str, Any]:
    """What the last training of a run comes to, however it was gone about."""
    end = record["ends"][-1]
    return {
        "state": end["state"],
        "optimizers": end["optimizers"],
        "schedulers": end["schedulers"],
        "metrics": _by_epoch(end["callback_metrics"], in_step=False),
        "global_step": end["counters"]["global_step"],
        "current_epoch": end["counters"]["current_epoch"],
    }


def survived(record: Record) -> dict[str, Any]:
    """What an error of memory changes nothing of, whatever smaller pieces followed."""
    rows = [(step, _by_epoch(values, in_step=False)) for step, values in record["rows"] if "oom_events" not in values]
    kept = ("state_dict", "epoch", "global_step")
    return {
        **outcome(record),
        "scaler": record["ends"][-1]["scaler"],
        "rates_of_steps": record["rates_of_steps"],
        "steps_of_validations": record["steps_of_validations"],
        "rows": rows,
        "checkpoints": {name: {key: file[key] for key in kept} for name, file in record["checkpoints"].items()},
    }


def _end(end: Any, in_step: bool) -> dict[str, Any]:
    parts = {name: part for name, part in end.items() if name not in ("random", "draw")}
    parts["callback_metrics"] = _by_epoch(end["callback_metrics"], in_step)
    parts["logged_metrics"] = _by_epoch(end["logged_metrics"], in_step)
    if not in_step:
        parts["counters"] = {name: value for name, value in end["counters"].items() if name not in COUNTS_OF_BATCHES}
        parts["loops"] = {name: state for name, state in end["loops"].items() if name != "fit"}
    return parts


def _events(events: list[Event], in_step: bool) -> list[Event]:
    """The hooks that are not called for each piece."""
    left_out = BY_PIECE | (set() if in_step else BY_BATCH)
    return [event for event in events if event.hook not in left_out]


def _by_epoch(values: dict[str, Any], in_step: bool) -> dict[str, Any]:
    """Logged values; a value by step is that of a micro-batch where the loader yields these."""
    return {name: None if name.endswith("_step") and not in_step else value for name, value in values.items()}


def _checkpoint(content: dict[str, Any], in_step: bool) -> dict[str, Any]:
    return {name: part for name, part in content.items() if in_step or name != "loops"}
