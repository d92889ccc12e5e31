"""The package's own keys of a configuration, how they are read and shown. Nothing here imports torch."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.other_tools import OWN_KEYS, SECTIONS, Groups, in_our_words
from lightning_ga.errors import UserError

Config = dict[str, Any]
Task = Enum("Task", ["fit", "validate", "test", "predict", "export"])
Progress = Enum("Progress", ["auto", "bar", "plain", "none"])
Direction = Enum("Direction", ["min", "max"])
LARGER_IS_BETTER = re.compile(  # words of metrics, without their digits: f is that of f1, r that of r2
    "acc|accuracy|top|auroc|auc|auprc|ap|map|ar|mar|f|fbeta|precision|recall|sensitivity|specificity|m?iou|giou|jaccard|"
    "dice|kappa|mcc|matthews|r|psnr|ssim|snr|sdr|bleu|rouge|meteor|chrf|pearson|spearman|kendall|ndcg|mrr|pq|score|reward"
)
SMALLER_IS_BETTER = re.compile("loss|error|err")  # they win over one of the others, as in dice_loss
NUMBER = r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
COUNT, SHARE, AMOUNT = (1, math.inf, "at least 1"), (0, 1, "from 0 to 1"), (0, math.inf, "at least 0")
RANGES: dict[str, tuple[float, float, str]] = {  # of typed numbers, by the last part of the key
    **dict.fromkeys(("batch_size", "eval_batch_size", "image_size", "channels", "in_channels", "num_classes"), COUNT),
    **dict.fromkeys(("samples", "max_length", "context", "width", "depth", "heads", "vocabulary", "rows"), COUNT),
    **dict.fromkeys(("log_every_n_steps", "check_val_every_n_epoch", "num_nodes", "step_size", "T_max"), COUNT),
    **dict.fromkeys(
        ("val_fraction", "test_fraction", "label_smoothing", "momentum", "pct_start", "decay", "noise"), SHARE
    ),
    **dict.fromkeys(("lr", "weight_decay", "mixup", "cutmix", "num_workers", "patience", "max_lr"), AMOUNT),
    **dict.fromkeys(("gradient_clip_val", "warmup_epochs", "limit_train_batches", "limit_val_batches"), AMOUNT),
    "warmup": (0, 1, "a share of the steps from 0 to 1; lr_scheduler.warmup_epochs=… counts epochs"),
    "final": (0, 1, "a share of optimizer.lr from 0 to 1"),
    "max_epochs": (1, math.inf, "at least 1, or -1 for no end"),
    "max_steps": (1, math.inf, "at least 1, or -1 for no end"),
    "save_top_k": (0, math.inf, "at least 0, or -1 for all"),
    "seed": (0, 2**32 - 1, "from 0 to 4294967295, or null"),
    "temperature": (1e-9, math.inf, "above 0"),
    "layer_decay": (1e-9, 1, "above 0 and at most 1"),
}
GROUPS_OF_MODELS = ("optimizer", "lr_scheduler")  # that are read by models which ask for them


@dataclass
class Settings:
    """The keys at the top of ``train.yaml``; a configuration without one of them has its default."""

    task: Task = Task.fit
    seed: int | None = 0
    ckpt_path: str | None = None
    dry_run: bool = False
    test: bool = True
    optimized_metric: str | None = None
    optimized_direction: Direction | None = None
    progress: Progress = Progress.auto
    checkpoint_every: str | None = None  # a number of windows, or a time
    elastic: bool = False  # the number of ranks may change from start to start


def read_settings(cfg: DictConfig) -> Settings:
    """Read the package's own keys; refuse those that contradict each other, and a run that lacks a class."""
    given = {key.name: cfg[key.name] for key in fields(Settings) if key.name in cfg}
    result: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), given))
    if result.elastic and result.checkpoint_every is None:
        result.checkpoint_every = "60s"
    if result.dry_run and result.task is not Task.fit:
        raise UserError(f"dry_run=true shows the plan of a training, and task={result.task.name} has none: drop one.")
    if {"callbacks", "logger"} & {*(cfg.get("trainer") or ())}:
        raise UserError("trainer.callbacks and trainer.logger are read by nothing: set callbacks.NAME._target_=…")
    if cfg.get("train") is False:  # of lightning-hydra-template
        added = "" if "task" in cfg else "+"
        raise UserError(f"train=false is read by nothing here: write {added}task=test ckpt_path=best.")
    for name in ("model", "data", "trainer"):
        if "_target_" not in [*(cfg.get(name) or ())]:
            raise UserError(f"{name}._target_ is missing: choose {name}=OPTION.")
    return result  # type: ignore[no-any-return]


def unread_groups(cfg: DictConfig, arguments: Sequence[str] = ()) -> set[str]:
    """The groups for models that no class reads; a typed key of one, such as ``optimizer.lr``, is refused."""
    texts = {str(key): str(value) for key, value in OmegaConf.to_container(cfg).items()}  # type: ignore[union-attr]
    unread = {*GROUPS_OF_MODELS}
    for _ in GROUPS_OF_MODELS:  # a schedule may read the optimizer's rate
        readers = "".join(text for key, text in texts.items() if key not in unread)
        unread -= {name for name in unread if re.search(rf"[{{:]{name}\b", readers)}
    typed = next((one for one in arguments if re.split(r"[.=]", one)[0] in unread), None)
    if typed is not None:
        raise UserError(
            f"{typed} is read by nothing, as {cfg.model.get('_target_')} makes its own: set a key of model, or write "
            "optimizer: ${optimizer} in the file of your model, as conf/model/mlp.yaml does."
        )
    return unread


def check_typed(cfg: DictConfig, words: Sequence[str], groups: Groups) -> list[str]:
    """Refuse numbers out of their range and mistyped sections; return warnings of other keys that nothing reads."""
    texts = {str(key): str(value) for key, value in OmegaConf.to_container(cfg).items()}  # type: ignore[union-attr]
    known, unread = (*SECTIONS, *OWN_KEYS, *groups, "hydra"), []
    for group in ("experiment", "debug"):
        if OmegaConf.is_dict(cfg.get(group)):
            raise UserError(f"The keys of {group}=… are below {group}: begin its file with # @package _global_.")
    for key in texts.keys() - {*known}:
        nearest = get_close_matches(key, known, n=1, cutoff=0.85)
        if nearest and not any(f"{{{key}." in text or f"{{{key}}}" in text for text in texts.values()):
            unread.append(f"{key} in a configuration file is read by nothing: did you mean {nearest[0]}?")
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        first, name = re.split(r"[./@]", key)[0], key.rpartition(".")[2]
        if value == "None" and not word.startswith("-"):
            raise UserError(f"{word} is the text None: write {key}=null for no value.")
        low, high, rule = RANGES.get(name, (-math.inf, math.inf, ""))
        is_number = first in (*SECTIONS, "seed") and re.fullmatch(NUMBER, value) is not None
        if is_number and not low <= float(value) <= high and (value != "-1" or "-1" not in rule):
            raise UserError(f"{word} must be {rule}.")
        others = "".join(text for other, text in texts.items() if other != first)
        if first in known or word.startswith(("-", "~")) or re.search(rf"[{{:]{re.escape(first)}\b", others):
            continue
        ours, nearest = in_our_words(key, value, groups), get_close_matches(first, known, n=1, cutoff=0.75)
        if (
            ours is not None and ours.partition("=")[0] in {*OWN_KEYS} - texts.keys()
        ):  # not in a train.yaml of one's own
            ours = f"+{ours}"
        if ours is not None or nearest:
            raise UserError(
                f"{word} is read by nothing: write {ours or key.replace(first, nearest[0], 1) + '=' + value}."
            )
        unread.append(f"{word} is read by nothing here: it only goes to loggers and into config.yaml.")
    return unread


def shown(cfg: DictConfig) -> Config:
    """The configuration for others to read: ``${oc.env:NAME}`` stays as it is written, unread groups are left out."""
    content: Any = OmegaConf.to_container(cfg)
    unread = unread_groups(cfg)
    return {str(key): value for key, value in content.items() if key not in unread}


def walk(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their full keys; a list is one value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def direction_of(metric: str | None) -> str:
    """Whether a metric of this name is to be small or large; ``min`` for names that are not known."""
    last = str(metric).rpartition("/")[2]
    name = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", last)
    words = re.findall(r"[a-z]+", f"{name} {last}".lower())
    is_error = any(map(SMALLER_IS_BETTER.fullmatch, words))
    return "max" if any(map(LARGER_IS_BETTER.fullmatch, words)) and not is_error else "min"


def named(name: Any) -> str:
    """The end of a folder's name."""
    return "" if name is None else "-" + re.sub(r"[^\w.+-]+", "_", str(name))


def elastic(key: str) -> Any:
    """An argument of the Trainer for the ranks that torchrun has started."""
    return import_module("lightning_ga.elastic").trainer_arguments()[key]  # imports torch: not before it is needed


OmegaConf.register_new_resolver("elastic", elastic, replace=True, use_cache=True)
OmegaConf.register_new_resolver("named", named, replace=True)
OmegaConf.register_new_resolver("of_several", lambda k: "" if k in (0, 1) else "-{epoch}-{step}", replace=True)
