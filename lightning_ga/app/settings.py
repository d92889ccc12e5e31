"""The package's own keys of a configuration, how they are read and shown. Nothing here imports torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_ga.app.other_tools import OWN_KEYS, SECTIONS, Groups, by_nearest, in_our_words, is_override
from lightning_ga.errors import UserError

Config = dict[str, Any]
Task = Enum("Task", ["fit", "validate", "test", "predict", "export"])
Progress = Enum("Progress", ["auto", "bar", "plain", "none"])
Direction = Enum("Direction", ["min", "max"])
OF_GROUPS = {  # arguments of the Trainer that groups and keys decide, and what to write instead
    "callbacks": "callbacks.NAME._target_=…",
    "logger": "logger.NAME._target_=…",
    "enable_checkpointing": "callbacks=none for a run without checkpoints",
    "enable_progress_bar": "progress=bar, plain or none",
}
BETTER = {"max": "larger is better", "min": "smaller is better"}  # by direction
LARGER_IS_BETTER = re.compile(  # words of metrics, without their digits: f is that of f1, r that of r2
    "acc|accuracy|top|auroc|auc|auprc|ap|map|ar|mar|f|fbeta|precision|recall|sensitivity|specificity|m?iou|giou|jaccard|"
    "dice|kappa|mcc|matthews|r|psnr|ssim|snr|sdr|bleu|rouge|meteor|chrf|pearson|spearman|kendall|ndcg|mrr|pq|score|reward"
)
SMALLER_IS_BETTER = re.compile("loss|error|err")  # they win over one of the others, as in dice_loss


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
    for group in ("experiment", "debug"):
        if OmegaConf.is_dict(cfg.get(group)):
            raise UserError(f"The keys of {group}=… are below {group}: begin its file with # @package _global_.")
    if result.dry_run and result.task is not Task.fit:
        raise UserError(f"dry_run=true shows the plan of a training, and task={result.task.name} has none: drop one.")
    if result.ckpt_path == "auto" and result.task is not Task.fit:
        raise UserError(f"ckpt_path=auto is for task=fit, and this is task={result.task.name}: give ckpt_path=best.")
    for key in OF_GROUPS.keys() & {*(cfg.get("trainer") or ())}:
        raise UserError(f"trainer.{key} is read by nothing: write {OF_GROUPS[key]}.")
    if not isinstance(cfg.get("tags") or [], (list, ListConfig)):
        raise UserError(f"tags={cfg.tags} is no list: write tags=[{cfg.tags}].")
    if cfg.get("train") is False:  # of lightning-hydra-template
        added = "" if "task" in cfg else "+"
        raise UserError(f"train=false is read by nothing here: write {added}task=test ckpt_path=best.")
    for name in ("model", "data", "trainer"):
        if "_target_" not in [*(cfg.get(name) or ())]:
            raise UserError(f"{name}._target_ is missing: choose {name}=OPTION.")
    return result  # type: ignore[no-any-return]


def unread_groups(cfg: DictConfig) -> set[str]:
    """The groups for models that no class reads: no other section takes its value from them."""
    texts = texts_of(cfg)
    unread = set()
    for name in ("lr_scheduler", "optimizer"):  # in this order, because a schedule may read the optimizer's rate
        if not is_referred_to(name, texts):
            unread.add(name)
            texts.pop(name, None)
    return unread


def texts_of(cfg: DictConfig) -> dict[str, str]:
    """The sections of a configuration as texts, with interpolations as they are written."""
    sections: Any = OmegaConf.to_container(cfg)
    return {str(section): str(content) for section, content in sections.items()}


def is_referred_to(name: str, texts: Mapping[str, str]) -> bool:
    """Whether an interpolation in the text of another section names this one."""
    others = "".join(text for section, text in texts.items() if section != name)
    return re.search(rf"[{{:]{re.escape(name)}\b", others) is not None


def check_typed(cfg: DictConfig, words: Sequence[str], groups: Groups) -> list[str]:
    """Refuse mistyped keys and Python's word for no value; return warnings of other keys that nothing reads.

    Keys of a group that no class reads are refused, too, such as ``optimizer.lr``.
    """
    texts = texts_of(cfg)
    known = (*SECTIONS, *OWN_KEYS, *groups, "hydra")
    read = {*known, *(section for section in texts if is_referred_to(section, texts))}
    warnings = []
    for section in texts.keys() - read:
        said = f"{section} in a configuration file is read by nothing: did you mean {{}}?"
        warnings.append(by_nearest(section, known, said, cutoff=0.85))
    unread = unread_groups(cfg)
    for word in words:
        if not is_override(word):
            continue
        key, _, value = word.lstrip("+~").partition("=")
        section = re.split(r"[./@]", key)[0]
        if section in unread:
            target = OmegaConf.select(cfg, "model._target_")
            raise UserError(
                f"{word} is read by nothing, as {target} makes its own: set a key of model, or write "
                "optimizer: ${optimizer} in the file of your model, as conf/model/mlp.yaml does."
            )
        if value == "None" and section in (*SECTIONS, "seed"):
            raise UserError(f"{word} is the text None: write {key}=null for no value.")
        if section in read or word.startswith("~"):
            continue
        near = f"{{}}{key.removeprefix(section)}={value}"
        ours = in_our_words(key, value, groups) or by_nearest(section, known, near, cutoff=0.75)
        if ours:
            is_added = ours.partition("=")[0] in {*OWN_KEYS} - texts.keys()  # to a train.yaml of one's own
            raise UserError(f"{word} is read by nothing: write {'+' * is_added}{ours}.")
        warnings.append(f"{word} is read by nothing here: it only goes to loggers and into config.yaml.")
    return [*filter(None, warnings)]


def shown(cfg: DictConfig) -> Config:
    """The configuration for others to read: ``${oc.env:NAME}`` stays as it is written, unread groups are left out."""
    content: Any = OmegaConf.to_container(cfg)
    for name in unread_groups(cfg):
        content.pop(name, None)
    return dict(content)


def direction_of(metric: str) -> str:
    """Whether a metric of this name is to be small or large; ``min`` for names that are not known."""
    name = metric.partition("/dataloader_idx_")[0].rpartition("/")[2]
    split = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", name)  # F1Score: f1 score
    words = re.findall(r"[a-z]+", f"{split} {name}".lower())
    if any(map(LARGER_IS_BETTER.fullmatch, words)) and not any(map(SMALLER_IS_BETTER.fullmatch, words)):
        return "max"
    return "min"


def named(name: Any) -> str:
    """The end of a folder's name."""
    return "" if name is None else "-" + re.sub(r"[^\w.+-]+", "_", str(name))


def elastic(key: str) -> Any:
    """An argument of the Trainer for the ranks that torchrun has started."""
    return import_module("lightning_ga.elastic").trainer_arguments()[key]  # imports torch: not before it is needed


OmegaConf.register_new_resolver("elastic", elastic, replace=True, use_cache=True)
OmegaConf.register_new_resolver("named", named, replace=True)
OmegaConf.register_new_resolver("of_several", lambda k: "" if k in (0, 1) else "-{epoch}-{step}", replace=True)
