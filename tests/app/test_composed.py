import re
import sys
import webbrowser
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.composed import check_file, completions, typed_targets

OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper"


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"callbacks": {"x": {"_target_": "os.getcwd"}}}, "callbacks.x._target_"),
        ({"job": {"env_set": {"LD_PRELOAD": "x.so"}}}, "job.env_set.LD_PRELOAD"),
        ({"sweeper": {"_target_": "os.getcwd"}}, "sweeper._target_"),
        ({"sweeper": {"params": {"x": {"_target_": "os.getcwd"}}}}, "sweeper.params.x._target_"),
        ({"launcher": {"_target_": "${oc.env:LAUNCHER}"}}, "launcher._target_"),
        *(
            ({"sweeper": {"sampler": {"_target_": target}}}, "sweeper.sampler._target_")
            for target in (
                "hydra._internal.core_plugins.basic_launcher.logging.os.system",  # begins well, ends elsewhere
                "hydra._internal.core_plugins.basic_launcher.run_job",
                f"{OPTUNA}.instantiate",
                "optuna.samplers._tpe.sampler.os.system",
            )
        ),
    ],
)
def test_a_file_has_hydra_build_nothing_before_the_job(section, name):
    with pytest.raises(UserError, match=re.escape(f"sets hydra.{name} to what would be used before")):
        check_file(Path("mine.yaml"), OmegaConf.create({"hydra": section}))


@pytest.mark.parametrize(
    "target",
    [
        *("hydra._internal.core_plugins.basic_launcher.BasicLauncher", "optuna.samplers.TPESampler"),
        f"{OPTUNA}.OptunaSweeper",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
    ],
)
def test_launchers_and_sweepers_of_hydras_plugins_are_built(target):
    check_file(Path("mine.yaml"), OmegaConf.create({"hydra": {"launcher": {"_target_": target}}}))
    with pytest.raises(UserError, match=r"sets hydra\.launcher\._target_"):
        check_file(Path("mine.yaml"), OmegaConf.create({"hydra": {"launcher": {"_target_": f"{target}.run"}}}))


def with_handler(key: str, **handler: str) -> dict:
    return {key: {"handlers": {"a": handler}}}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"searchpath": ["pkg://os"]}, "searchpath"),
        ({"searchpath": ["structured://os"]}, "searchpath"),
        ({"searchpath": ["${scheme}://os"]}, "searchpath"),
        ({"searchpath": "${paths}"}, "searchpath"),
        ("${mine}", ""),
        (None, ""),
        ({"callbacks": {"x": {"_target_": "os.getcwd"}}}, "callbacks"),
        ({"job": {"env_set": {"LD_PRELOAD": "x.so"}}}, "job.env_set"),
        ({"job": {"env_copy": ["TOKEN"]}}, "job.env_copy"),
        ({"job": {"name": "../../.bashrc"}}, "job.name"),
        ({"output_subdir": "../../elsewhere"}, "output_subdir"),
        ({"run": {"dir": "a\nb"}}, "run.dir"),
        ({"sweep": {"subdir": "${mine}"}}, "sweep.subdir"),
        ({"sweep": {"subdir": "../../elsewhere"}}, "sweep.subdir"),
        ({"help": {"template": "x"}}, "help.template"),
        ({"sweeper": {"params": {"hydra.verbose": True}}}, "sweeper.params.hydra.verbose"),
        ({"sweeper": {"_target_": "os.getcwd"}}, "sweeper._target_"),
        ({"sweeper": {"custom_search_space": "os.system"}}, "sweeper.custom_search_space"),
        ({"sweeper": {"storage": "sqlite:////etc/x.db"}}, "sweeper.storage"),
        ({"sweeper": "${mine}"}, "sweeper"),
        ({"sweeper": {"params": {"hydra.searchpath": "[pkg://os]"}}}, "sweeper.params.hydra.searchpath"),
        ({"sweeper": {"params": {"+hydra.callbacks.x._target_": "os.getcwd"}}}, "sweeper.params.+hydra"),
        ({"sweeper": {"params": {"hydra/launcher": "x"}}}, "sweeper.params.hydra/launcher"),
        ({"sweeper": {"params": {"seed=1,2 hydra": "x"}}}, "sweeper.params.seed=1"),
        ({"launcher": {"setup": ["touch x"]}}, "launcher.setup"),
        ({"launcher": {"partition": "gpu\ntouch x"}}, "launcher.partition"),
        ({"launcher": {"additional_parameters": {"wrap": "touch x"}}}, "launcher.additional_parameters.wrap"),
        ({"launcher": {"pre_dispatch": "print(1)"}}, "launcher.pre_dispatch"),
        ({"launcher": {"n_jobs": "${oc.env:X}"}}, "launcher.n_jobs"),
        ({"job_logging": "${mine}"}, "job_logging"),
        ({"job_logging": {"handlers": "${mine.handlers}"}}, "job_logging.handlers"),
        *(
            (with_handler(key, **handler), f"{key}.handlers.a.")
            for key in ("job_logging", "hydra_logging")
            for handler in (
                {"()": "os.system"},
                {"()": "logging.os.system"},
                {"class": "subprocess.Popen"},
                {"class": "logging.FileHandler"},
                {"filename": "/tmp/x", "mode": "w"},
                {"filename": "${oc.env:S}"},
                {"filename": "${hydra.runtime.output_dir}/x.log"},
                {"stream": "ext://antigravity.x"},
                {"stream": "${oc.env:S}"},
                {"level": "ext://antigravity.x"},
            )
        ),
        ({"job_logging": {"formatters": {"simple": {"format": "ext://antigravity.x"}}}}, "job_logging.formatters"),
        ({"job_logging": {"formatters": {"simple": {"()": "os.system"}}}}, "job_logging.formatters"),
    ],
)
def test_a_file_sets_only_what_does_no_harm_in_hydras_section(section, name):
    with pytest.raises(UserError, match=re.escape(f"'mine.yaml' sets hydra{'.' if name else ''}{name}")):
        check_file(Path("mine.yaml"), OmegaConf.create({"hydra": section}))


def test_a_file_sets_folders_searches_and_numbers():
    """What experiments of a user's own need."""
    params = {"optimizer.lr": "interval(1e-4, 1e-2)", "+data.x": [1, 2]}
    optuna = {"params": params, "n_trials": 20, "direction": "minimize"}
    logs = {"root": {"level": "DEBUG"}, "formatters": {"simple": {"format": "%(asctime)s %(message)s"}}}
    section = {
        "searchpath": ["file:///home/me/conf", "file://${oc.env:HOME}/conf"],
        "run": {"dir": "outputs/${now:%H}"},
        "sweep": {"dir": "${paths.sweep_root}/x", "subdir": "${hydra.job.num}"},
        "job": {"name": "mine", "chdir": False},
        "sweeper": {**optuna, "sampler": {"_target_": "optuna.samplers.TPESampler", "seed": 3}},
        "launcher": {"n_jobs": 2, "timeout_min": 60, "partition": "gpu-a,gpu-b"},
        "job_logging": logs,
    }
    check_file(Path("mine.yaml"), OmegaConf.create({"hydra": section, "seed": 1}))


FIRST = "# @package _global_\n"
NINE = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(7)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{FIRST}hydra:\n  searchpath: [pkg://antigravity]\n", "sets hydra.searchpath"),
        ("# @package hydra.launcher\nsetup: [touch x]\n", "sets hydra.launcher.setup"),
        (f"{FIRST}defaults: [{{/experiment@hydra.launcher: other}}]\n", "sets hydra.launcher.setup"),
        (f"{FIRST}defaults: [../../aside]\n", "sets hydra.output_subdir"),
        (FIRST + "\n".join(NINE), "is too large, with its aliases written out"),
        (f"{FIRST}a: &a\n  b: *a\n", "is too large, with its aliases written out"),
        (f"{FIRST}x: {'[' * 600}{']' * 600}\n", "is too large, with its aliases written out"),
        (FIRST + "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else 'x'}]" for n in range(999)), "is too large, with"),
        (f"{FIRST}x: '{'y' * 1_100_000}'\n", "is not a regular file of at most 1,000,000 bytes"),
        ("- a\n- b\n", "holds no keys"),
        (FIRST.encode() + b"x: \xff\n", "is not UTF-8"),
        (f"{FIRST}x: \x00\n", "is no valid YAML"),
        (f"\ufeff{FIRST}seed: 1\n", "begins with a byte order mark"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
@pytest.mark.parametrize("primary", [False, True])
def test_a_file_is_checked_before_hydra_uses_it(command, monkeypatch, content, words, primary):
    """By any way in, and even where the configuration is only shown; what is too large is refused at once."""
    sys.modules.pop("antigravity", None)
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail("a module was imported"))
    folder = Path("mine/experiment")
    folder.mkdir(parents=True)
    data = content.encode() if isinstance(content, str) else content
    (folder / "bad.yaml").write_bytes(data)
    (folder / "other.yaml").write_text("setup: [touch x]\n")
    Path("aside.yaml").write_text("hydra:\n  output_subdir: ../x\n")
    if primary:
        Path("mine/main.yaml").write_bytes(data.replace(b"../../aside", b"../aside").replace(b"@package _global_", b""))
    line = ("--config-name", "main") if primary else ("experiment=bad",)
    for shown in (("--cfg", "job"), ()):
        assert words in command("--config-dir", "mine", *line, *shown).mistake
    assert "antigravity" not in sys.modules


def test_only_the_command_line_names_packages_to_trust():
    assert typed_targets(["allow_targets=[a,b.c]"]) == ("a", "b.c")
    for wrong in ("allow_targets=null", "allow_targets=3", "allow_targets=[1]", "allow_targets=a"):
        with pytest.raises(UserError, match="must be a list of packages"):
            typed_targets([wrong])


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("task=", "task=fit task=predict task=test task=validate"),
        ("task=t", "task=test"),
        ("accumulate.on_oom=", "accumulate.on_oom=raise accumulate.on_oom=split"),
        ("compile=ma", "compile=max-autotune compile=max-autotune-no-cudagraphs"),
        ("seed=", ""),
        ("tas", ""),
    ],
)
def test_choices_are_offered(word: str, offered: str) -> None:
    """Those that the table of values allows; nothing for numbers and keys."""
    assert " ".join(completions(word)) == offered


def test_files_are_offered_where_a_path_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside best and last; below the home folder as it was typed, which the shell compares with."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "my last.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completions("ckpt_path=") == ["ckpt_path=best", "ckpt_path=last", "ckpt_path=runs/"]
    assert completions("ckpt_path=runs/a/m") == ["ckpt_path=runs/a/my last.ckpt"]
    assert completions("model.init_from=~/r") == ["model.init_from=~/runs/"]
    assert completions("paths.data_dir=./") == ["paths.data_dir=./runs/"]


def test_the_shell_is_answered(command, monkeypatch) -> None:
    """Through Hydra's own completion, which still answers all else."""
    for line, answer in (
        ("model=mlp task=v", "task=validate"),
        ("data.batch", "data.batch_size="),
        ("model=g", "model=gpt"),
    ):
        monkeypatch.setenv("COMP_LINE", f"lightning-ga {line}")
        assert command("-sc", "query=bash").out.strip() == answer


DOUBLED = "\n".join(f"a{n + 1}: ${{a{n}}}${{a{n}}}" for n in range(28))
LISTED = "\n".join(f"a{n + 1}: ['${{a{n}}}', '${{a{n}}}']" for n in range(28))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"a0: x\n{DOUBLED}\nmodel: {{name: '${{a28}}'}}\n", "The interpolations of the configuration grow without"),
        (f"a0: x\n{LISTED}\ndata: {{augment: '${{a28}}'}}\n", "The interpolations of the configuration grow without"),
        (f"a: {'${oc.decode:' * 200}1{'}' * 200}\nseed: ${{a}}\n", "nests deeper than can be read"),
        ("a: ${b}\nb: ${a}\nseed: ${a}\n", "seed has no value (Recursive interpolation detected)"),
        ("seed: ${oc.env:NOWHERE}\n", "seed has no value (\"Environment variable 'NOWHERE' not found\")"),
        ("paths: {output_root: null}\n", "paths.output_root=null must be the path of a folder"),
        ("1: 2\n", "sets 1, which nothing reads"),
        ("trainr:\n  max_epochs: 1\n", "sets trainr, which nothing reads; did you mean trainer?"),
        ("trainer:\n  max_epoch: 1\n", "unexpected keyword argument 'max_epoch'"),
        ("paths:\n  output: x\n", "sets paths.output, which nothing reads"),
        ("data:\n\tbatch_size: 1\n", 'bad.yaml", line 3, column 1'),
        ("allow_targets: [os]\n", "allow_targets=os stands in a configuration file"),
        (
            "model:\n  name: '\\${oc.env:PL_GLOBAL_SEED,x}'\n",
            "model.name=${oc.env:PL_GLOBAL_SEED,x} is an interpolation",
        ),
        ("defaults:\n  - override /optimizer: nope\n", "optimizer=nope does not exist"),
        ("null: 2\n", "Incompatible key type 'NoneType'."),
        ("callbacks: {x: {_target_: 5}}\n", "callbacks.x._target_=5 is not on the list of what a configuration may"),
        ("callbacks: {x: {_target_: torch.nn.Identity, _recursive_: x}}\n", "x._recursive_=x must be true or"),
        ("model: {_target_: torch.nn.Identity}\n", "model._target_=torch.nn.Identity builds no LightningModule"),
        ("defaults: [bad]\n", "The configuration includes itself"),
        ("overwrite: true\n", "overwrite=true stands in a configuration file"),
    ],
    ids=lambda value: value[:30],
)
def test_a_mistake_in_a_file_ends_in_one_sentence_and_leaves_no_folder(command, content, words):
    """However much the file asks for."""
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/bad.yaml").write_text(f"{FIRST}{content}")
    assert words in command("--config-dir", "mine", "experiment=bad", "model=mlp").mistake
    assert [path.name for path in Path().iterdir()] == ["mine"]
