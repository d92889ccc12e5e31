"""What users of other programs type, in the words of this command line. Nothing here imports torch.

Names are those of timm's ``train.py``, lightning-hydra-template, LightningCLI and Ultralytics.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from lightning_ga.errors import UserError

Groups = Mapping[str, Sequence[str]]
OPTIONS = (  # of Hydra and of this program
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r"),
    *("--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--config-dir"),
    *("-cd", "--experimental-rerun", "--info", "-i", "--traceback"),
)
TAKE_A_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
MAY_TAKE_ONE = (*TAKE_A_VALUE, "--experimental-rerun", "--info", "-i")
SECTIONS = (
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "callbacks",
    "logger",
    "accumulate",
    "paths",
    "run",
)
OWN_KEYS = (
    "task",
    "seed",
    "ckpt_path",
    "dry_run",
    "test",
    "optimized_metric",
    "optimized_direction",
    "progress",
    "checkpoint_every",
    "elastic",
    "tags",
)
OF_TRAINER = (
    *("max_epochs", "max_steps", "devices", "accelerator", "strategy", "num_nodes", "accumulate_grad_batches"),
    *("gradient_clip_val", "limit_train_batches", "limit_val_batches", "limit_test_batches", "log_every_n_steps"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "enable_model_summary"),
)
ADDED_TO_TRAINER = (
    "min_epochs",
    "max_time",
    "fast_dev_run",
    "overfit_batches",
    "deterministic",
    "benchmark",
    "profiler",
)
TASKS = {"train": "fit", "val": "validate", "eval": "validate", "inference": "predict"}
COMMANDS = {  # words that stand alone
    **{word: f"task={TASKS.get(word, word)}" for word in (*TASKS, "fit", "validate", "test", "predict", "export")},
    **dict.fromkeys(("classify", "detect", "segment", "yolo"), ""),
}
WORDS = {  # what is typed, or what is typed with a certain value: what to type here, {} for the value
    **dict.fromkeys(
        ("b", "batch_size", "batch", "train_batch_size", "per_device_train_batch_size"), "data.batch_size={}"
    ),
    **dict.fromkeys(("vb", "validation_batch_size", "eval_batch_size"), "data.eval_batch_size={}"),
    **dict.fromkeys(("lr", "lr0", "learning_rate", "lr_base", "base_lr", "model.lr"), "optimizer.lr={}"),
    **dict.fromkeys(
        ("epochs", "epoch", "num_epochs", "n_epochs", "num_train_epochs", "max_epoch"), "trainer.max_epochs={}"
    ),
    **dict.fromkeys(("opt", "optim", "optimiser"), "optimizer={}"),
    **dict.fromkeys(("wd", "weight_decay"), "optimizer.weight_decay={}"),
    **dict.fromkeys(("sched", "scheduler", "model.scheduler"), "lr_scheduler={}"),
    **dict.fromkeys(("gpus", "trainer.gpus", "n_gpus", "ngpus"), "trainer.accelerator=gpu trainer.devices={}"),
    **dict.fromkeys(("j", "workers", "data.workers"), "data.num_workers={}"),
    **dict.fromkeys(("data_dir", "data.data_dir", "data_path", "data.data_root", "source"), "data.root={}"),
    **dict.fromkeys(("output", "output_dir", "project", "paths.log_dir", "default_root_dir"), "paths.output_root={}"),
    **dict.fromkeys(("img_size", "image_size", "imgsz", "input_size", "data.img_size"), "data.image_size={}"),
    **dict.fromkeys(("in_chans", "channels"), "data.channels={}"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm"), "trainer.gradient_clip_val={}"),
    **dict.fromkeys(("grad_accum_steps", "gradient_accumulation_steps"), "trainer.accumulate_grad_batches={}"),
    **dict.fromkeys(("smoothing", "label_smoothing"), "model.label_smoothing={}"),
    **dict.fromkeys(("drop", "dropout", "drop_rate", "model.drop_rate"), "+model.options.drop_rate={}"),
    **dict.fromkeys(("drop_path", "drop_path_rate"), "+model.options.drop_path_rate={}"),
    **dict.fromkeys(
        ("resume", "checkpoint", "ckpt", "resume_from", "resume_from_checkpoint", "weights"), "ckpt_path={}"
    ),
    **dict.fromkeys(("eval_metric", "monitor"), "optimized_metric={}"),
    **dict.fromkeys(("name", "task_name", "exp_name", "experiment_name"), "run.name={}"),
    **dict.fromkeys(("seed_everything", "random_seed"), "seed={}"),
    **dict.fromkeys(("amp", "half", "fp16"), "precision=bf16-mixed"),
    **dict.fromkeys(
        ("patience", "early_stopping"), "callbacks=[default,early_stopping] callbacks.early_stopping.patience={}"
    ),
    **dict.fromkeys(("print_config", "extras.print_config"), "--cfg job"),
    **dict.fromkeys(("early_stopping=true", "callbacks=early_stopping"), "callbacks=[default,early_stopping]"),
    **dict.fromkeys(("model_ema", "ema"), "callbacks=[default,ema]"),
    **dict.fromkeys(("log_wandb", "wandb"), "logger=[default,wandb]"),
    **dict.fromkeys(("hpo", "hparams_search"), "-m KEY=VALUE,VALUE … (a grid), or hydra/sweeper=optuna ({plugin})"),
    **{name: f"trainer.{name}={{}}" for name in OF_TRAINER},
    **{name: f"+trainer.{name}={{}}" for name in ADDED_TO_TRAINER},
    **{f"trainer.{name}": f"+trainer.{name}={{}}" for name in ADDED_TO_TRAINER},
    "model.name": "model=timm model.name={}",
    "optimizer.name": "optimizer=timm optimizer.name={}",
    "layer_decay": "optimizer=timm optimizer.layer_decay={}",
    "opt_eps": "+optimizer.eps={}",
    "opt_betas": "+optimizer.betas=[0.9,0.999]",
    **dict.fromkeys(("callbacks.best.mode", "callbacks.early_stopping.mode"), "optimized_direction={}"),
    "trainer.callbacks": "callbacks=[default,early_stopping]",
    "trainer.logger": "logger=[default,wandb]",
    "momentum": "optimizer.momentum={}",
    "warmup_epochs": "lr_scheduler.warmup_epochs={}",
    "min_lr": "lr_scheduler.final=SHARE",
    "lrf": "lr_scheduler.final={}",
    "cos_lr": "lr_scheduler=cosine",
    "aa": "data.rand_augment=9",
    "mixup": "data.mixup={}",
    "cutmix": "data.cutmix={}",
    "num_classes": "model.num_classes={}",
    "pretrained": "model=timm model.pretrained=true",
    "freeze": "a model of your own, with requires_grad_(False)",
    "model_ema_decay": "callbacks=[default,ema] callbacks.ema.decay={}",
    "sync_bn": "+trainer.sync_batchnorm=true",
    "log_interval": "trainer.log_every_n_steps={}",
    "datamodule": "data={}",
    "dataset": "data={}",
    "effective_batch_size": "accumulate.effective_batch_size={}",
    "memory_budget": "accumulate.memory_budget={}",
    "resume=true": "ckpt_path=last",
    "train": "task=fit",
    "train=false": "task=test ckpt_path=best",
    "mode": "task={}",
    "device": "trainer.devices={}",
    "device=cpu": "trainer.accelerator=cpu",
    "device=cuda": "trainer.accelerator=gpu",
    "device=0": "trainer.accelerator=gpu",
    "extras.ignore_warnings": "PYTHONWARNINGS=ignore in front of the command",
    "extras.enforce_tags": "tags=[NAME]",
    **dict.fromkeys(("config", "c"), "--config-dir FOLDER experiment=NAME"),
    "callbacks.model_summary": "trainer.enable_model_summary=true",
}
PARENTS = {  # sections of others, of which a key is typed
    "callbacks.model_checkpoint": "callbacks.best",
    "callbacks.early_stopping": "callbacks=[default,early_stopping] callbacks.early_stopping",
    "callbacks.ema": "callbacks=[default,ema] callbacks.ema",
    "model.optimizer": "optimizer",
    "model.scheduler": "lr_scheduler",
    "model.lr_scheduler": "lr_scheduler",
    "datamodule": "data",
}
PLUGINS = {  # of Hydra, by group and option
    "hydra/sweeper/optuna": "pip install hydra-optuna-sweeper, whose 1.3.0 needs Optuna below 3: pip takes 2.10",
    "hydra/sweeper/ax": "pip install hydra-ax-sweeper",
    "hydra/sweeper/nevergrad": "pip install hydra-nevergrad-sweeper",
    "hydra/launcher/joblib": "pip install hydra-joblib-launcher",
    "hydra/launcher/ray": "pip install hydra-ray-launcher",
    "hydra/launcher/rq": "pip install hydra-rq-launcher",
    "hydra/launcher/submitit_local": "pip install hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "pip install hydra-submitit-launcher",
    "hydra/job_logging/colorlog": "pip install hydra-colorlog",
    "hydra/hydra_logging/colorlog": "pip install hydra-colorlog",
}


def config_folder() -> Path:
    """``conf``: inside the package in a wheel, beside it in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def in_our_words(typed: str, value: str, groups: Groups) -> str | None:
    """Return what to type here for a key or option of another program; ``None`` for names that are not known."""
    name = typed.lstrip("-").replace("-", "_").replace(".init_args", "")
    template = WORDS.get(f"{name}={value}".lower()) or WORDS.get(name)
    for parent, ours in PARENTS.items():
        if name.startswith(f"{parent}.") and template is None:
            return f"{ours}{name.removeprefix(parent)}={value}"
    is_class = name in ("model", "data") and "." in value and value.partition(".")[0].isidentifier()
    if is_class and "/" not in value:
        template = f"{name}=own {name}._target_={{}}"
    elif template == "optimizer={}" or name in groups:
        group = name if name in groups else "optimizer"
        of_timm = {"model": "model=timm model.name={}", "optimizer": "optimizer=timm optimizer.name={}"}
        is_option = value.lower() in groups.get(group, ())
        template = f"{group}={value.lower()}" if is_option else of_timm.get(group, f"{group}={{}}")
    if template is None:
        return None
    return template.replace("{plugin}", PLUGINS["hydra/sweeper/optuna"]).replace("{}", value or "VALUE")


def check_words(words: Sequence[str], groups: Groups) -> None:
    """Refuse words that are neither options of this command line nor KEY=VALUE, with what to type instead of them."""
    typed: list[str] = []
    ours: list[str] = []
    before = ""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        is_option = name.startswith("-") and name != "-"
        if before and before == name and not equals:  # the value of an option of another program
            typed.append(word)
        elif is_option and (name not in OPTIONS or (name == "-c" and after.endswith("ml"))):
            follows = bool(after) and not after.startswith("-") and "=" not in after and not equals
            typed.append(word)
            ours.append(_option_in_our_words(name, value or (after if follows else "true"), groups))
            before = after if follows else ""
            continue
        elif not is_option and not equals and not word.startswith("~") and before not in MAY_TAKE_ONE:
            typed.append(word)
            ours.append(_word_in_ours(word, before, after))
        if re.search(r"=[\[{(].*,$", word) and after:  # model.hidden=[32, 64]
            raise UserError(f"{word} {after} …: quote a value with blanks because of the shell: '{word} {after} …'.")
        before = word
    if typed:
        are = "are words" if len(typed) > 1 else "is a word"
        raise UserError(
            f"{' '.join(typed)} {are} of another program; here is KEY=VALUE: write {' '.join(filter(None, ours))}."
        )


def _option_in_our_words(name: str, value: str, groups: Groups) -> str:
    key = name.lstrip("-").rstrip("+").replace(".init_args", "")
    ours = in_our_words(key, value, groups)
    if ours is None and key.partition(".")[0] in (*OWN_KEYS, *SECTIONS):
        ours = f"{key}={value}"
    if ours is None:
        nearest = get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
        hint = (
            f"did you mean {nearest[0]}?"
            if nearest
            else "keys are set as KEY=VALUE, without dashes; --help lists them."
        )
        raise UserError(f"{name} is no option of this command line: {hint}")
    return ours


def _word_in_ours(word: str, before: str, after: str) -> str:
    if after.startswith("=") or before.endswith("="):  # trainer.max_epochs = 3
        raise UserError(f"{word} stands alone: write KEY=VALUE without blanks around the =.")
    if word in COMMANDS:
        return COMMANDS[word]
    if "/" in word:
        return f"data=image_folder data.root={word}"
    key, colon, value = word.partition(":")
    example = f", such as {key}={value}" if colon else "; --help lists the keys"
    raise UserError(f"{word} stands alone: write KEY=VALUE{example}.")
