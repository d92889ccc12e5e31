"""Which values the keys of a configuration may have: one table, looked at before anything is built.

Hydra takes any value for any key. Most wrong ones would come to light deep inside a library, or never; those that
a constructor refuses in a sentence are left to it, and so are keys that are not in the table.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from lightning_ga.errors import UserError
from lightning_ga.plan.config import CHOICES
from lightning_ga.plan.units import LEAST_BYTES, require_bytes

BUILT = ("data", "model", "optimizer", "lr_scheduler", "accumulate", "trainer")
KNOWN = ("lightning_ga.", "lightning.pytorch.", "torch.optim.")  # classes whose keys mean what the table says
MODELS, TEXT_MODELS = "lightning_ga.models.", ("lightning_ga.models.GPT",)
MONITORED = ("val/acc", "val/top5", "val/loss", "train/acc", "train/loss")  # measured before a checkpoint is kept
MEASURED = (*MONITORED, "test/acc", "test/loss", "test/top5", "test/macro_f1", "test/weighted_f1")
MONITORED_OF_TEXT = ("val/loss", "val/perplexity", "train/loss")
MEASURED_OF_TEXT = (*MONITORED_OF_TEXT, "test/loss", "test/perplexity")
SMALLER_IS_BETTER = ("loss", "perplexity")
MOST_WORKERS = 256  # processes: some thousands would bring a machine to a stop
LARGEST_IMAGE = 4096  # pixels a side: a single picture takes 200 MB
Config = dict[str, Any]


def walk(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping, list and value, however deep, with its full key; what contains others comes before them.

    Examples:
        >>> list(walk({"a": {"b": [1]}}))[1:]
        [('a', {'b': [1]}), ('a.b', [1]), ('a.b[0]', 1)]
    """
    yield where, content
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from walk(value, f"{where}.{key}".lstrip("."))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from walk(value, f"{where}[{index}]")


def settings(content: Any) -> Config:
    """The values by their full keys; a list is one value."""
    return {key: value for key, value in walk(content) if not isinstance(value, Mapping) and "[" not in key}


class Rule(NamedTuple):
    """What a value must be, in words that follow "must be", with an example and, if they can be listed, all choices."""

    words: str
    example: Any
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()

    def sentence(self, key: str, value: Any) -> str:
        """What is told of a value that breaks the rule."""
        nearest = get_close_matches(str(value), map(str, self.choices), n=1)
        return (
            f"{key}={shown(value)} must be {self.words}; for example {key}={nearest[0] if nearest else self.example}."
        )


def number(
    example: float, least: float = -math.inf, most: float = math.inf, *, whole: bool = False, besides: Any = ()
) -> Rule:
    """A finite number in a range, or one of a few values besides."""
    words = "a whole number" if whole else "a number"
    if most < math.inf:
        words += f" from {least} to {most}"
    elif least > -math.inf:
        words += f" of at least {least}"

    def holds(value: Any) -> bool:
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        return value in besides or (is_number and least <= value <= most and abs(value) != math.inf)

    return Rule(" or ".join([words, *map(shown, besides)]), example, holds)


def count(example: int, least: int = 1, most: float = math.inf, besides: Any = ()) -> Rule:
    """A whole number."""
    return number(example, least, most, whole=True, besides=besides)


def one_or_more(rule: Rule) -> Rule:
    """A value that obeys a rule, or a list of such values."""
    words, several = f"{rule.words}, or a list of such numbers", list_of(rule, "").holds
    return Rule(words, rule.example, lambda v: v != [] and several(v if isinstance(v, list) else [v]))


def list_of(rule: Rule, example: str) -> Rule:
    """A list of values that obey a rule."""
    return Rule(f"a list, each {rule.words}", example, lambda v: isinstance(v, list) and all(map(rule.holds, v)))


def one_of(*choices: Any) -> Rule:
    """One of a few values."""
    return Rule(f"one of {', '.join(map(shown, choices))}", shown(choices[0]), lambda v: v in choices, choices)


def shown(value: Any) -> str:
    """A value as the user could have typed it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or '""'


NULL = (None,)
SWITCH = Rule("true or false", "true", lambda value: isinstance(value, bool))
TEXT = Rule("a text", "text", lambda value: isinstance(value, str) and value != "")
FOLDER = Rule("the path of a folder", "outputs", TEXT.holds)
FILE = Rule("a path or null", "last", lambda value: value is None or TEXT.holds(value))
WORD = re.compile(r"\w[\w.+-]{0,63}")
NAME = Rule(
    "a name of letters, digits and . _ + - that begins with one of the first two, of at most 64",
    "first",
    lambda value: bool(WORD.fullmatch(shown(value))),
)
PART = number(0.1, 0, 1)
SHARE = Rule("a number above 0 and below 1", 0.1, lambda value: PART.holds(value) and 0 < value < 1)
AMOUNT = "a share of an epoch above 0 or a number of batches"
LIMIT = number(1.0, 0)  # from 1 on Lightning refuses fractions
BETAS = Rule(
    "two numbers of at least 0 and below 1",
    "[0.9,0.999]",
    lambda value: isinstance(value, list) and len(value) == 2 and all(PART.holds(beta) and beta < 1 for beta in value),
)
NODES = Rule(
    "a list of transforms",
    "[{_target_: torchvision.transforms.v2.RandomHorizontalFlip}]",
    lambda value: isinstance(value, list) and all(isinstance(one, dict) and "_target_" in one for one in value),
)
COMPILE = one_of(True, False, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

TABLE: tuple[tuple[str, Rule], ...] = (
    ("task", one_of("fit", "validate", "test", "predict")),
    ("progress", one_of("auto", "bar", "rich", "plain", "none")),
    ("optimized_metric", Rule("the name of a metric", "val/acc", TEXT.holds)),
    ("compile", COMPILE),
    ("seed", count(0, 0, 2**32 - 1, NULL)),
    ("ckpt_path model.init_from", FILE),
    ("dry_run overwrite test data.download data.check_pictures data.skip_broken", SWITCH),
    ("model.pretrained model.group_norm model.sparse optimizer.nesterov optimizer.decay_norms", SWITCH),
    ("accumulate.verify accumulate.cache accumulate.scale_beta2", SWITCH),
    ("run.name", NAME),
    ("run.tags", list_of(NAME, "[tried,small]")),
    ("paths.data_dir paths.output_root paths.output_dir data.root", FOLDER),
    ("precision.float32_matmul", one_of("highest", "high", "medium")),
    ("trainer.max_epochs", count(4, besides=(-1, None))),
    ("trainer.min_epochs trainer.log_every_n_steps", count(5, 0, besides=NULL)),
    ("trainer.max_steps", count(1000, besides=(-1,))),
    (
        "trainer.devices",
        Rule("a number of devices, a list of them or auto", 1, lambda value: value not in (0, "0", [])),
    ),
    ("trainer.num_nodes", count(1)),
    ("trainer.accumulate_grad_batches", count(4)),
    ("trainer.gradient_clip_val", number(1.0, 0, besides=NULL)),
    ("trainer.limit_train_batches", Rule(AMOUNT, 1.0, lambda value: LIMIT.holds(value) and value != 0)),
    ("trainer.limit_val_batches trainer.limit_test_batches trainer.overfit_batches", LIMIT),
    ("trainer.val_check_interval", Rule(AMOUNT, 0.5, lambda value: value != 0)),
    ("trainer.check_val_every_n_epoch", count(1, besides=NULL)),
    ("trainer.num_sanity_val_steps", count(0, 0, besides=(-1, None))),
    ("trainer.deterministic", one_of(True, False, None, "warn")),
    ("callbacks.best.save_top_k", count(1, -1)),
    ("callbacks.early_stopping.patience", count(3, 0)),
    ("data.num_workers", count(0, 0, MOST_WORKERS)),
    ("data.image_size", count(32, 1, LARGEST_IMAGE)),
    ("data.channels", one_of(1, 3)),
    ("data.mean", one_or_more(number(0.5))),
    ("data.std", one_or_more(number(0.5, 1e-6))),
    ("data.augment", NODES),
    ("data.rand_augment", count(9, 0, 30, NULL)),
    ("data.mixup data.cutmix", number(0.2, 0)),
    ("data.split_seed", count(0, 0, 2**32 - 1)),
    ("data.val_fraction data.test_fraction", SHARE),
    ("data.noise model.label_smoothing optimizer.momentum", PART),
    ("lr_scheduler.warmup lr_scheduler.final lr_scheduler.pct_start", PART),
    ("data.batch_size data.eval_batch_size data.samples data.max_length lr_scheduler.step_size", count(32)),
    ("model.in_channels model.image_size model.rows model.features model.context", count(32)),
    ("model.width model.depth model.heads", count(32)),
    ("model.vocabulary", count(256, 256)),
    ("model.hidden", list_of(count(32), "[512,256]")),
    ("model.name", Rule("a name of timm.list_models()", "resnet18", TEXT.holds)),
    ("model.options", Rule("a mapping", "{drop_rate:0.1}", lambda value: isinstance(value, dict))),
    ("data.num_classes model.num_classes", count(10, besides=NULL)),
    ("optimizer.lr lr_scheduler.max_lr", number(0.001, 0)),
    ("optimizer.weight_decay lr_scheduler.gamma", number(0.01, 0)),
    ("optimizer.betas", BETAS),
    *((f"accumulate.{name}", one_of(*choices)) for name, choices in CHOICES.items() if True not in choices),
)
RULES: Mapping[str, Rule] = {key: rule for keys, rule in TABLE for key in keys.split()}


def direction(metric: str) -> str:
    """Say whether a metric is to be small or large: ``${direction:METRIC}`` in a configuration.

    Examples:
        >>> direction("val/loss"), direction("val/acc")
        ('min', 'max')
    """
    return "min" if str(metric).endswith(SMALLER_IS_BETTER) else "max"


def suffix(name: Any, *, _root_: Any) -> str:
    """The end of a run's folder, which others see: not a variable's value. Hydra makes it before values are checked."""
    if name is not None and not NAME.holds(name):
        raise UserError(NAME.sentence("run.name", name))
    with placeholders():
        return "" if name is None or "${" in str(_root_.run.name) else f"-{name}"


def at_home(path: Any) -> str:
    """The root of the folders of runs, in which Hydra takes no ``~`` for the home folder."""
    if not FOLDER.holds(path):
        raise UserError(FOLDER.sentence("paths.output_root", path))
    return os.path.expanduser(str(path))  # noqa: PTH111 (that of Path fails for users that are not there)


RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "direction": direction,
    "named": suffix,
    "mlflow_tags": lambda tags: OmegaConf.create(dict.fromkeys(tags, "")),  # there each tag has a value
    "home": at_home,
}
for name, resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, resolver, replace=True)


def resolved(cfg: DictConfig) -> Config:
    """The configuration as plain values: what is checked is what is built, whatever variables change meanwhile."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def as_written(cfg: DictConfig, config: Config) -> Config:
    """A resolved configuration as it may be read by others: ``${oc.env:NAME}`` where a value is that of a variable."""
    try:
        with placeholders():
            texts = OmegaConf.to_container(cfg, resolve=True)
    except Exception:  # a key or another resolver needs the value itself
        texts = OmegaConf.to_container(cfg, resolve=False)
    written: Config = hidden(config, texts)
    return written


@contextmanager
def placeholders() -> Iterator[None]:
    """A context in which what stands for a variable's value is read in place of it."""
    OmegaConf.register_new_resolver("oc.env", placeholder, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def placeholder(name: str, *default: str | None) -> str | None:
    """In place of a variable's value, what stands for it."""
    return f"${{oc.env:{name}}}" if name in os.environ or not default else default[0]


def hidden(content: Any, texts: Any) -> Any:
    """The content, with the texts that name variables in their places."""
    if isinstance(content, dict) and isinstance(texts, dict):
        return {key: hidden(value, texts.get(key)) for key, value in content.items()}
    if isinstance(content, list) and isinstance(texts, list) and len(content) == len(texts):
        return [hidden(value, text) for value, text in zip(content, texts)]
    return texts if isinstance(texts, str) and "${" in texts else content


def check_values(config: Config) -> None:
    """Refuse the first value of a resolved configuration that breaks its rule, and keys that contradict each other.

    Whole numbers that were written as ``1e3`` become whole numbers, and ``~/`` the home folder.
    """
    for section in (*config.values(), config):
        if isinstance(section, dict) and is_known(section):
            section.update({name: as_typed(value) for name, value in section.items()})
    for key, rule in RULES.items():
        *sections, name = key.split(".")
        place: Any = config
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict) and name in place and is_known(place) and not rule.holds(place[name]):
            raise UserError(rule.sentence(key, place[name]))
    for sentence in contradictions(config):
        raise UserError(sentence)


def is_known(section: Config) -> bool:
    """Whether a section's keys mean what the table says: a class of the user's own may use them otherwise."""
    return str(section.get("_target_", KNOWN[0])).startswith(KNOWN)


def as_typed(value: Any) -> Any:
    """A value as it was meant: a path below the home folder, and a whole number.

    1000.0, which is how YAML reads 1e3, as 1000, in a schedule by epochs too; not 1.0, which may be a share.
    """
    if isinstance(value, dict):
        return {key: as_typed(size) if isinstance(key, int) else size for key, size in value.items()}
    if isinstance(value, str) and value.startswith("~/"):
        return str(Path(value).expanduser())
    return int(value) if isinstance(value, float) and value > 1 and value.is_integer() else value


def contradictions(config: Config) -> Iterator[str]:
    """What is wrong with keys that are right alone, each in a sentence."""
    task, memory, dry_run = config["task"], config["device_memory"], config["dry_run"]
    if dry_run and task != "fit":
        yield f"dry_run=true shows the plan of a training, and task={task} has none: leave one of the two out."
    for name in {"callbacks", "logger"} & (config.get("trainer") or {}).keys():
        yield f"trainer.{name} is read by nothing: write {name}=OPTION or {name}.NAME._target_=CLASS."
    nodes = {name: config.get(name) for name in BUILT}
    for group in ("callbacks", "logger"):
        nodes |= {f"{group}.{name}": node for name, node in (config.get(group) or {}).items()}
    for name, node in nodes.items():
        if node and not (isinstance(node, dict) and node.get("_target_")):
            given = name if isinstance(node, dict) else f"{name}={shown(node)}"
            yield (
                f"{given} has no _target_, and builds nothing: choose {name.partition('.')[0]}=OPTION (--help lists "
                f"them), or give {name}._target_=CLASS."
            )
    if memory is not None:
        require_bytes("device_memory", memory, least=LEAST_BYTES)
        if not dry_run:
            yield (
                f"device_memory={memory} plans for a device that is not here, and nothing can be trained on it: "
                "add dry_run=true, or emulate a smaller device with accumulate.memory_budget=…."
            )
        if not config.get("accumulate"):
            yield "device_memory=… needs a callback that plans: leave accumulate=off out."
    model, data = config.get("model") or {}, config.get("data") or {}
    if not str(model.get("_target_")).startswith(MODELS):
        return
    for name in ("optimizer", "lr_scheduler"):
        if name in model and model[name] != config.get(name):
            yield f"model.{name} is read from {name}: choose {name}=OPTION, or set {name}.KEY."
    for own, other in (("in_channels", "channels"), ("image_size", "image_size"), ("context", "max_length")):
        wanted, found = model.get(own), data.get(other)
        if wanted is not None and found is not None and wanted != found:
            yield f"model.{own}={wanted} does not fit data.{other}={found}: set data.{other}, which the model follows."
    monitored, measured = (
        (MONITORED_OF_TEXT, MEASURED_OF_TEXT) if model["_target_"] in TEXT_MODELS else (MONITORED, MEASURED)
    )
    metric = config["optimized_metric"]
    if metric not in measured:  # it would come to light after an epoch
        yield f"optimized_metric={metric} is not measured: choose one of {', '.join(measured)}."
    for name, callback in (config.get("callbacks") or {}).items():
        if (callback or {}).get("monitor", monitored[0]) not in (None, *monitored):
            yield (
                f"callbacks.{name} cannot watch {callback['monitor']}, which is not measured while training: "
                f"choose one of {', '.join(monitored)} (optimized_metric=…), or callbacks=none."
            )
