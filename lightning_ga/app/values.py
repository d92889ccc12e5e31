"""Which values the keys of a configuration may have: one table, looked at before anything is built.

Hydra takes any value for any key, and a wrong one would come to light deep inside a library, or
never. A key that is not in the table is left to whoever is given it.
"""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from lightning_ga.errors import UserError
from lightning_ga.plan.budget import parse_device_memory

KNOWN = ("lightning_ga.", "lightning.pytorch.", "torch.optim.")  # classes whose keys mean what the table says
MODELS = "lightning_ga.models."
MONITORED = ("val/acc", "val/loss", "train/acc", "train/loss")  # what the models log before a checkpoint is kept
MEASURED = (*MONITORED, "test/acc", "test/loss", "test/macro_f1", "test/weighted_f1")
TEXT_MODELS = ("lightning_ga.models.GPT",)
MONITORED_OF_TEXT = ("val/loss", "val/perplexity", "train/loss")
MEASURED_OF_TEXT = (*MONITORED_OF_TEXT, "test/loss", "test/perplexity")
SMALLER_IS_BETTER = ("loss", "perplexity")
MOST_WORKERS = 256  # processes: some thousands would bring a machine to a stop
LARGEST_IMAGE = 4096  # pixels a side: a single picture takes 200 MB
Config = dict[str, Any]


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        words: The rule, as in "must be ...".
        example: A value that obeys it.
        holds: Whether a value does.
        choices: The values that there are, where they can be listed.
    """

    words: str
    example: Any
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()

    def sentence(self, key: str, value: Any) -> str:
        """What is told of a value that breaks the rule."""
        nearest = get_close_matches(str(value), map(str, self.choices), n=1)
        example = nearest[0] if nearest else self.example
        return f"{key}={shown(value)} must be {self.words}; for example {key}={example}."


def whole(least: int, example: int, *, most: float = math.inf, or_null: str = "", endless: bool = False) -> Rule:
    """A whole number.

    Args:
        least: The smallest that may be.
        example: One that may be.
        most: The largest that may be.
        or_null: What null means; null may not be where this is left out.
        endless: Whether -1 may be, for no limit.
    """
    words = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"
    words += ", or -1 for no limit" if endless else ""
    words += f", or null for {or_null}" if or_null else ""

    def holds(value: Any) -> bool:
        if value is None:
            return bool(or_null)
        return is_whole(value) and (least <= value <= most or (endless and value == -1))

    return Rule(words, example, holds)


def number(words: str, example: float, holds: Callable[[float], bool], or_null: str = "") -> Rule:
    """A finite number of which something holds.

    Args:
        words: What it is, as in "must be ...".
        example: One that may be.
        holds: Whether a finite number may be.
        or_null: What null means; null may not be where this is left out.
    """
    text = f"{words}, or null for {or_null}" if or_null else words
    return Rule(text, example, lambda value: bool(or_null) if value is None else is_number(value) and holds(value))


def one_or_more(words: str, example: float, holds: Callable[[float], bool]) -> Rule:
    """One such number, or a list of them.

    Args:
        words: What each is.
        example: One that may be.
        holds: Whether a finite number may be.
    """

    def all_hold(value: Any) -> bool:
        several = value if isinstance(value, list) else [value]
        return bool(several) and all(is_number(one) and holds(one) for one in several)

    return Rule(f"{words}, or a list of such numbers", example, all_hold)


def one_of(*choices: Any) -> Rule:
    """One of a few values."""
    return Rule(f"one of {', '.join(map(str, choices))}", choices[0], lambda value: value in choices, choices)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of_counts(value: Any) -> bool:
    """Whether a value is a list of whole numbers of at least one; an empty one too."""
    return isinstance(value, list) and all(is_whole(count) and count >= 1 for count in value)


def is_list_of_nodes(value: Any) -> bool:
    """Whether a value is a list of things to build."""
    return isinstance(value, list) and all(isinstance(one, dict) and "_target_" in one for one in value)


def is_interval(value: Any) -> bool:
    """Whether a value is a share of an epoch, a number of batches, a time, or null."""
    if value is None or isinstance(value, str | dict):
        return value != ""
    return is_whole(value) and value >= 1 if is_whole(value) else is_number(value) and 0 < value <= 1


SWITCH = Rule("true or false", "true", lambda value: isinstance(value, bool))
SHARE = number("a number between 0 and 1, both excluded", 0.1, lambda value: 0 < value < 1)
PART = number("a number from 0 to 1", 0.1, lambda value: 0 <= value <= 1)
COUNT = whole(1, 32)
FOLDER = Rule("the path of a folder", "outputs", lambda value: isinstance(value, str) and value != "")
LIMIT = number("a share from 0 to 1, or a whole number of batches", 1.0, lambda v: v >= 0 and (v <= 1 or is_whole(v)))
TEXTS = Rule("a list of names", "[my_package]", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v))

RULES: Mapping[str, Rule] = {
    "task": one_of("fit", "validate", "test", "predict"),
    "seed": whole(0, 0, most=2**32 - 1, or_null="another run every time"),
    "dry_run": SWITCH,
    "test": SWITCH,
    "allow_targets": TEXTS,
    "progress": one_of("auto", "bar", "rich", "plain", "none"),
    "compile": Rule("true, false or a mode of torch.compile", "true", lambda v: isinstance(v, bool | str) and v != ""),
    "precision.float32_matmul": one_of("highest", "high", "medium"),
    "paths.data_dir": FOLDER,
    "paths.output_root": FOLDER,
    "paths.output_dir": FOLDER,
    "trainer.num_nodes": whole(1, 1),
    "trainer.max_epochs": whole(1, 4, endless=True, or_null="Lightning's default"),
    "trainer.min_epochs": whole(0, 1, or_null="none"),
    "trainer.max_steps": whole(1, 1000, endless=True),
    "trainer.accumulate_grad_batches": whole(1, 1),
    "trainer.gradient_clip_val": number("a number of at least 0", 1.0, lambda value: value >= 0, or_null="no clipping"),
    "trainer.limit_train_batches": LIMIT,
    "trainer.limit_val_batches": LIMIT,
    "trainer.limit_test_batches": LIMIT,
    "trainer.val_check_interval": Rule(
        "a share of an epoch above 0, or a whole number of batches of at least 1", 0.5, is_interval
    ),
    "trainer.check_val_every_n_epoch": whole(1, 1, or_null="validation by steps alone"),
    "trainer.log_every_n_steps": whole(0, 5, or_null="Lightning's default"),
    "trainer.num_sanity_val_steps": whole(0, 0, endless=True, or_null="Lightning's default"),
    "trainer.deterministic": Rule("true, false or warn", "true", lambda value: value in (True, False, None, "warn")),
    "data.download": SWITCH,
    "data.batch_size": COUNT,
    "data.eval_batch_size": COUNT,
    "data.num_workers": whole(0, 0, most=MOST_WORKERS),
    "data.image_size": whole(1, 32, most=LARGEST_IMAGE),
    "data.channels": one_of(1, 3),
    "data.num_classes": whole(1, 10, or_null="as many as the set has"),
    "data.mean": one_or_more("a number", 0.5, math.isfinite),
    "data.std": one_or_more("a number above 0", 0.5, lambda value: value > 0),
    "data.augment": Rule(
        "a list of transforms", "[{_target_: torchvision.transforms.v2.RandomHorizontalFlip}]", is_list_of_nodes
    ),
    "data.val_fraction": SHARE,
    "data.test_fraction": SHARE,
    "data.split_seed": whole(0, 0, most=2**32 - 1),
    "data.samples": whole(1, 1024),
    "data.noise": PART,
    "data.max_length": COUNT,
    "data.check_pictures": SWITCH,
    "data.skip_broken": SWITCH,
    "model.num_classes": whole(1, 10, or_null="as many as the set has"),
    "model.in_channels": COUNT,
    "model.image_size": COUNT,
    "model.pretrained": SWITCH,
    "model.vocabulary": whole(256, 256),
    "model.context": COUNT,
    "model.width": COUNT,
    "model.depth": COUNT,
    "model.heads": COUNT,
    "model.hidden": Rule("a list of whole numbers of at least 1", "[512,256]", is_list_of_counts),
    "optimizer.lr": number("a number of at least 0", 0.001, lambda value: value >= 0),
    "optimizer.nesterov": SWITCH,
    "lr_scheduler.warmup": PART,
    "lr_scheduler.final": PART,
    "accumulate.verify": SWITCH,
    "accumulate.cache": SWITCH,
}
FRACTIONS = ("accumulate.memory_budget", "trainer.val_check_interval", "trainer.overfit_batches")
"""Besides limits, where a number up to 1 is a share and a larger one counts."""


def direction(metric: str) -> str:
    """Say whether a metric is to be small or large: ``${direction:METRIC}`` in a configuration.

    Examples:
        >>> direction("val/loss"), direction("val/acc")
        ('min', 'max')
    """
    return "min" if metric.endswith(SMALLER_IS_BETTER) else "max"


OmegaConf.register_new_resolver("direction", direction, replace=True)


def resolved(cfg: DictConfig) -> Config:
    """The configuration as plain values: what is checked is what is built, whatever variables change meanwhile."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def check_values(config: Config) -> None:
    """Refuse the first value that breaks its rule, and keys that contradict each other.

    Whole numbers that were written as ``1e3`` become whole numbers.

    Args:
        config: The resolved configuration, as plain dicts and lists.

    Raises:
        UserError: With the key, the value, the rule and an example.
    """
    read_whole_numbers(config)
    for key, rule in RULES.items():
        place, name = section_of(config, key)
        if name not in place or not is_known(place):
            continue
        if not rule.holds(place[name]):
            raise UserError(rule.sentence(key, place[name]))
    if config["dry_run"] and config["task"] != "fit":
        raise UserError(
            f"dry_run=true shows the plan of a training, and task={config['task']} has none: leave one of the two out."
        )
    for name in ("callbacks", "logger"):
        if name in (config.get("trainer") or {}):
            raise UserError(f"trainer.{name} is read by nothing: write {name}=OPTION or {name}.NAME._target_=CLASS.")
    check_planned_device(config)
    check_agreement(config)
    check_metrics(config)


def read_whole_numbers(config: Config) -> None:
    """Turn 1000.0, which is how 1e3 is read, into 1000 where whole numbers are meant."""
    for key, rule in RULES.items():
        place, name = section_of(config, key)
        value = place.get(name)
        if isinstance(value, float) and value.is_integer() and rule.holds(int(value)) and not rule.holds(value):
            place[name] = int(value)
    for key in FRACTIONS:
        place, name = section_of(config, key)
        value = place.get(name)
        if isinstance(value, float) and value > 1 and value.is_integer():
            place[name] = int(value)
    section = config.get("accumulate") or {}
    for name in ("effective_batch_size", "accumulate", "micro_batch_size", "max_micro_batch_size"):
        value = section.get(name)
        if isinstance(value, dict):
            section[name] = {epoch: as_whole(size) for epoch, size in value.items()}
        elif name in section:
            section[name] = as_whole(value)


def as_whole(value: Any) -> Any:
    """A float without a fraction as a whole number, anything else as it is.

    Examples:
        >>> as_whole(1e3), as_whole(0.5), as_whole("auto")
        (1000, 0.5, 'auto')
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def section_of(config: Config, key: str) -> tuple[Config, str]:
    """The section that a key lies in, empty where there is none, and the key's name in it."""
    section, _, name = key.rpartition(".")
    place = config.get(section) if section else config
    return (place if isinstance(place, dict) else {}), name


def check_planned_device(config: Config) -> None:
    """Refuse to train on a device that is not here, and a plan for one that nothing makes."""
    memory = config["device_memory"]
    if memory is None:
        return
    parse_device_memory(memory)
    if not config["dry_run"]:
        raise UserError(
            f"device_memory={memory} plans for a device that is not here, and nothing can be trained on it: "
            "add dry_run=true, or emulate a smaller device with accumulate.memory_budget=…."
        )
    if not config.get("accumulate"):
        raise UserError("device_memory=… needs a callback that plans: leave accumulate=off out.")


def is_known(section: Config) -> bool:
    """Whether a section's keys mean what the table says: a class of the user's own may use them otherwise."""
    return str(section.get("_target_", KNOWN[0])).startswith(KNOWN)


def shown(value: Any) -> str:
    """A value as the user could have typed it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or '""'


def check_agreement(config: Config) -> None:
    """Refuse a model that is given other pictures than it is made for."""
    model, data = config.get("model") or {}, config.get("data") or {}
    if not str(model.get("_target_")).startswith(MODELS):
        return
    for own, other in (("in_channels", "channels"), ("image_size", "image_size")):
        wanted, given = model.get(own), data.get(other)
        if wanted is not None and given is not None and wanted != given:
            raise UserError(
                f"model.{own}={wanted} does not fit data.{other}={given}: set data.{other} alone, the model follows it."
            )


def check_metrics(config: Config) -> None:
    """Refuse a metric that the models here do not measure: it would come to light after an epoch."""
    model = str((config.get("model") or {}).get("_target_"))
    if not model.startswith(MODELS):
        return
    monitored, measured = (MONITORED_OF_TEXT, MEASURED_OF_TEXT) if model in TEXT_MODELS else (MONITORED, MEASURED)
    if config["optimized_metric"] not in measured:
        raise UserError(
            f"optimized_metric={config['optimized_metric']} is not measured: choose one of {', '.join(measured)}."
        )
    for name, callback in (config.get("callbacks") or {}).items():
        monitor = (callback or {}).get("monitor")
        if monitor is not None and monitor not in monitored:
            raise UserError(
                f"callbacks.{name} cannot watch {monitor}, which is not measured while training: "
                f"choose one of {', '.join(monitored)} (optimized_metric=…), or callbacks=none."
            )
