"""The critical batch of a run of the command line: its configuration and checkpoint, and a table of what was found.

Tested in tests/test_batch_size.py.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_ga.app import build
from lightning_ga.app.progress_lines import quiet_lightning
from lightning_ga.app.run_files import CONFIG, PLAN, read_json
from lightning_ga.app.terminal import interruptions_reported
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count

OF_BRANCHES = ("seeds", "scale_lr", "lr", "tolerance", "monitor")  # arguments of ``measure_batch_size``
OF_TRAINER = ("accelerator", "devices", "precision", "gradient_clip_val")  # null: as the run had it
PLAIN = {"_target_": "lightning_ga.AutoAccumulate"}  # of a run with accumulate=off
OF_BRANCH = {"accumulate": None, "scale_lr": "none", "verify": False}  # in place of what the run's callback had
KEPT = "finished branches are kept, and the same command continues with the others."


def branch_from(typed: Sequence[str], measure: Callable[..., Any], *, description: str) -> None:
    """Measure for ``ckpt_path=RUN`` with further keys, as they are typed, and print a table."""
    parameters = signature(measure).parameters
    defaults = {name: parameters[name].default for name in OF_BRANCHES}
    keys = {"ckpt_path": "RUN", "batch": None, "samples": None, "trainer": dict.fromkeys(OF_TRAINER), **defaults}
    if {"-h", "--help"} & {*typed}:
        print(f"{description}\n{OmegaConf.to_yaml(OmegaConf.create(keys))}")
        return
    given = composed(keys, typed)
    path = Path(str(given.pop("ckpt_path")))
    if not isinstance(given["trainer"], dict):
        raise UserError(f"trainer={given['trainer']} names no option here: write trainer.accelerator=cpu.")
    if path.is_dir():
        path = path / "checkpoints" / "last.ckpt"
    folder = path.parent.parent
    if not (path.is_file() and (folder / CONFIG).is_file() and (folder / PLAN).is_file()):
        raise UserError(f"ckpt_path={path} is no checkpoint in the folder of a run with its config.yaml and plan.json.")
    cfg: Any = OmegaConf.merge(OmegaConf.load(folder / CONFIG), {"paths": {"output_dir": str(folder)}})
    if given["batch"] is None:
        given["batch"] = batch_of(cfg, folder)
    if given["samples"] is None:
        given["samples"] = 64 * require_count("batch", given["batch"])
    cfg.accumulate = cfg.get("accumulate") or PLAIN
    for key, value in given.pop("trainer").items():
        given[key] = value or cfg.trainer.get(key)

    def make() -> tuple[Any, Any]:
        data = build.make(cfg, "data")
        build.follow_classes(cfg, data)
        return build.make(cfg, "model"), data

    def make_callback(size: int) -> Any:
        of_branch: Any = OmegaConf.merge(cfg, {"accumulate": {**OF_BRANCH, "effective_batch_size": size}})
        build.use_full_names(of_branch.accumulate)
        return build.make(of_branch, "accumulate")

    with quiet_lightning(), interruptions_reported(lambda: KEPT):
        found = measure(make, path, folder=folder / "batch_size", make_callback=make_callback, **given)
    print(f"{'batch':>8}  {'loss':>8}  standard error")
    for point in found.points:
        print(f"{point.batch:>8}  {point.loss:>8.4f}  {point.error:.4f}")
    print(found.sentence())


def composed(keys: dict[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """The values by key, with those that were typed."""
    defaults = OmegaConf.create(keys, flags={"struct": True})
    try:
        content: Any = OmegaConf.to_container(OmegaConf.merge(defaults, OmegaConf.from_cli([*typed])))
    except Exception as error:  # of YAML, or of OmegaConf for a key that is not there
        raise UserError(" ".join(str(error).split())) from error
    return dict(content)


def batch_of(cfg: Any, folder: Path) -> int:
    """Return the effective batch of a run, unless its batch or its rate followed a schedule."""
    section = cfg.get("accumulate") or {}
    schedules = (section.get("effective_batch_size"), section.get("accumulate"))
    plan = read_json(folder / PLAN).get("plan")
    if not plan or any(map(OmegaConf.is_dict, schedules)) or section.get("scale_lr", "none") != "none":
        raise UserError(
            "The run's batch or learning rate followed a schedule, or it ran with accumulate=off: give batch=…, which "
            "the rate is for."
        )
    return int(plan["effective_batch_size"])
