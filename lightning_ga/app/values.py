"""Which values the keys of a configuration may have: one table, looked at before anything is built.

Hydra takes any value for any key, and a wrong one would come to light deep inside a library, or
never. A key that is not in the table is left to whoever is given it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from lightning_ga.errors import UserError
from lightning_ga.probe.planned.device import read_device_memory

KNOWN = ("lightning_ga.", "lightning.pytorch.", "torch.optim.")  # classes whose keys mean what the table says
MODELS = "lightning_ga.models."
MONITORED = ("val/acc", "val/loss", "train/acc", "train/loss")  # what the models log before a checkpoint is kept
MEASURED = (*MONITORED, "test/acc", "test/loss", "test/macro_f1", "test/weighted_f1")


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        words: The rule, as in "must be ...".
        example: A value that obeys it.
        holds: Whether a value does.
    """

    words: str
    example: Any
    holds: Callable[[Any], bool]


def whole(least: int, example: int, *, most: float = math.inf, or_null: str = "", endless: bool = False) -> Rule:
    """A whole number from ``least``; ``or_null`` says what null means, ``endless`` allows -1."""
    words = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"
    words += ", or -1 for no limit" if endless else ""
    words += f", or null for {or_null}" if or_null else ""

    def holds(value: Any) -> bool:
        if value is None:
            return bool(or_null)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and (least <= value <= most or (endless and value == -1))

    return Rule(words, example, holds)


def number(words: str, example: float, holds: Callable[[float], bool], or_null: str = "") -> Rule:
    """A finite number of which something holds."""
    text = f"{words}, or null for {or_null}" if or_null else words
    return Rule(text, example, lambda value: bool(or_null) if value is None else is_number(value) and holds(value))


def numbers(words: str, example: float, holds: Callable[[float], bool]) -> Rule:
    """One such number, or a list of them."""

    def all_hold(value: Any) -> bool:
        several = list(value) if OmegaConf.is_list(value) else [value]
        return bool(several) and all(is_number(one) and holds(one) for one in several)

    return Rule(f"{words}, or a list of such numbers", example, all_hold)


def one_of(*choices: Any) -> Rule:
    """One of a few values."""
    return Rule(f"one of {', '.join(map(str, choices))}", choices[0], lambda value: value in choices)


def is_memory(value: Any) -> bool:
    """Whether a value is an amount of memory, or null."""
    try:
        return value is None or read_device_memory(value) > 0
    except UserError:
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


SWITCH = Rule("true or false", "true", lambda value: isinstance(value, bool))
SHARE = number("a number between 0 and 1, both excluded", 0.1, lambda value: 0 < value < 1)
PART = number("a number from 0 to 1", 0.1, lambda value: 0 <= value <= 1)
COUNT = whole(1, 32)

RULES: Mapping[str, Rule] = {
    "seed": whole(0, 0, most=2**32 - 1, or_null="another run every time"),
    "dry_run": SWITCH,
    "device_memory": Rule("bytes or a text such as 16GiB, or null for this device", "16GiB", lambda v: is_memory(v)),
    "test": SWITCH,
    "precision.float32_matmul": one_of("highest", "high", "medium"),
    "trainer.num_nodes": whole(1, 1),
    "trainer.max_epochs": whole(1, 4, endless=True, or_null="Lightning's default"),
    "trainer.min_epochs": whole(0, 1, or_null="none"),
    "trainer.max_steps": whole(1, 1000, endless=True),
    "trainer.accumulate_grad_batches": whole(1, 1),
    "trainer.gradient_clip_val": number("a number of at least 0", 1.0, lambda value: value >= 0, or_null="no clipping"),
    "trainer.check_val_every_n_epoch": whole(1, 1, or_null="validation by steps alone"),
    "trainer.log_every_n_steps": whole(0, 5, or_null="Lightning's default"),
    "trainer.num_sanity_val_steps": whole(0, 0, endless=True, or_null="Lightning's default"),
    "trainer.deterministic": Rule("true, false or warn", "true", lambda value: value in (True, False, None, "warn")),
    "data.download": SWITCH,
    "data.batch_size": COUNT,
    "data.eval_batch_size": COUNT,
    "data.num_workers": whole(0, 0),
    "data.image_size": COUNT,
    "data.channels": one_of(1, 3),
    "data.num_classes": whole(1, 10, or_null="as many as the set has"),
    "data.mean": numbers("a number", 0.5, math.isfinite),
    "data.std": numbers("a number above 0", 0.5, lambda value: value > 0),
    "data.val_fraction": SHARE,
    "data.test_fraction": SHARE,
    "data.split_seed": whole(0, 0, most=2**32 - 1),
    "data.samples": whole(1, 1024),
    "data.noise": PART,
    "model.num_classes": whole(1, 10, or_null="as many as the set has"),
    "model.in_channels": COUNT,
    "model.image_size": COUNT,
    "model.pretrained": SWITCH,
    "optimizer.nesterov": SWITCH,
    "lr_scheduler.warmup": PART,
    "lr_scheduler.final": PART,
    "accumulate.verify": SWITCH,
    "accumulate.cache": SWITCH,
}


def check_values(cfg: DictConfig) -> None:
    """Refuse the first value that breaks its rule, and keys that contradict each other.

    Raises:
        UserError: With the key, the value, the rule and an example.
    """
    missing = object()
    for key, rule in RULES.items():
        section, _, name = key.rpartition(".")
        place = cfg.get(section) if section else cfg
        if not OmegaConf.is_dict(place) or name not in place or not is_known(place):
            continue
        value = OmegaConf.select(cfg, key, default=missing)
        if value is missing:
            value = None  # select() takes null for absent
        if not rule.holds(value):
            raise UserError(f"{key}={shown(value)} must be {rule.words}; for example {key}={rule.example}.")
    if cfg.dry_run and cfg.task != "fit":
        raise UserError(
            f"dry_run=true shows the plan of a training, and task={cfg.task} has none: leave one of the two out."
        )
    check_planned_device(cfg)
    check_agreement(cfg)
    check_metrics(cfg)


def check_planned_device(cfg: DictConfig) -> None:
    """Refuse to train on a device that is not here, and a plan for one that nothing makes."""
    if cfg.device_memory is None:
        return
    if not cfg.dry_run:
        raise UserError(
            f"device_memory={cfg.device_memory} plans for a device that is not here, and nothing can be trained on it: "
            "add dry_run=true, or emulate a smaller device with accumulate.memory_budget=…."
        )
    if not cfg.get("accumulate"):
        raise UserError("device_memory=… needs a callback that plans: leave accumulate=off out.")


def is_known(section: Any) -> bool:
    """Whether a section's keys mean what the table says: a class of the user's own may use them otherwise."""
    return str(section.get("_target_", KNOWN[0])).startswith(KNOWN)


def shown(value: Any) -> str:
    """A value as the user could have typed it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or '""'


def check_agreement(cfg: DictConfig) -> None:
    """Refuse a model that is given other pictures than it is made for."""
    model, data = cfg.get("model") or {}, cfg.get("data") or {}
    if not str(model.get("_target_")).startswith(MODELS):
        return
    for own, other in (("in_channels", "channels"), ("image_size", "image_size")):
        wanted, given = model.get(own), data.get(other)
        if wanted is not None and given is not None and wanted != given:
            raise UserError(
                f"model.{own}={wanted} does not fit data.{other}={given}: set data.{other} alone, the model follows it."
            )


def check_metrics(cfg: DictConfig) -> None:
    """Refuse a metric that the models here do not measure: it would come to light after an epoch."""
    if not str((cfg.get("model") or {}).get("_target_")).startswith(MODELS):
        return
    if cfg.optimized_metric not in MEASURED:
        raise UserError(
            f"optimized_metric={cfg.optimized_metric} is not measured: choose one of {', '.join(MEASURED)}."
        )
    for name, callback in (cfg.get("callbacks") or {}).items():
        monitor = (callback or {}).get("monitor")
        if monitor is not None and monitor not in MONITORED:
            raise UserError(
                f"callbacks.{name} cannot watch {monitor}, which is not measured while training: "
                f"choose one of {', '.join(MONITORED)} (optimized_metric=…), or callbacks=none."
            )
