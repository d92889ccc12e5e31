import pytest

from lightning_ga import UserError
from lightning_ga.app.arguments import typed_targets
from lightning_ga.app.composed import check_hydra_section, check_keys

PLAIN = {
    "callbacks": {},
    "job": {"env_set": {}},
    "sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"},
    "hydra_logging": {"handlers": {"a": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}},
    "job_logging": {
        "handlers": {
            "a": {"class": "logging.FileHandler", "filename": "${hydra.runtime.output_dir}/${hydra.job.name}.log"}
        }
    },
}


def with_handler(key: str, **handler: str) -> dict:
    return PLAIN | {key: {"handlers": {"a": handler}}}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (PLAIN | {"callbacks": {"x": {"_target_": "os.getcwd"}}}, "hydra.callbacks"),
        (PLAIN | {"job": {"env_set": {"LD_PRELOAD": "x.so"}}}, "hydra.job.env_set"),
        (PLAIN | {"sweeper": {"_target_": "os.getcwd"}}, "names os.getcwd"),
        (PLAIN | {"sweeper": {**PLAIN["sweeper"], "params": {"x": {"_target_": "os.getcwd"}}}}, "names os.getcwd"),
        (PLAIN | {"launcher": {"_target_": "${oc.env:LAUNCHER}"}}, "names"),
        *(
            (PLAIN | {"sweeper": {**PLAIN["sweeper"], "x": {"_target_": target}}}, f"names {target}")
            for target in (
                "hydra._internal.core_plugins.basic_launcher.logging.os.system",  # begins well, ends elsewhere
                "hydra._internal.core_plugins.basic_launcher.run_job",
                "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.instantiate",
                "optuna.samplers._tpe.sampler.os.system",
            )
        ),
        (with_handler("job_logging", **{"()": "os.system"}), "names os.system"),
        (with_handler("job_logging", **{"()": "logging.os.system"}), "names logging.os.system"),
        (with_handler("job_logging", **{"class": "subprocess.Popen"}), "names subprocess.Popen"),
        (with_handler("job_logging", **{"class": "logging.StreamHandler", "stream": "ext://antigravity.x"}), "ext://"),
        (with_handler("hydra_logging", **{"class": "logging.StreamHandler", "stream": "${oc.env:S}"}), "oc.env"),
        (with_handler("hydra_logging", **{"filename": "${hydra.runtime.output_dir}/x.log"}), "output_dir"),
        (with_handler("job_logging", **{"filename": "${oc.env:S}"}), "oc.env"),
        (PLAIN | {"job_logging": {"handlers": "${mine.handlers}"}}, "mine.handlers"),
    ],
)
def test_hydra_builds_nothing_before_the_job(section, words):
    """Callbacks, variables of the environment, plugins from elsewhere, and any import by way of logging."""
    check_hydra_section(PLAIN)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        check_hydra_section(section)


@pytest.mark.parametrize(
    "target",
    [
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "optuna.samplers.TPESampler",
    ],
)
def test_launchers_and_sweepers_of_hydras_plugins_are_built(target):
    """By the names that their own configurations have, and no others."""
    check_hydra_section(PLAIN | {"launcher": {"_target_": target}})
    with pytest.raises(UserError, match="names"):
        check_hydra_section(PLAIN | {"launcher": {"_target_": f"{target}.run"}})


def test_an_experiment_without_its_first_line_is_told():
    """Its keys would be merged to where nothing reads them."""
    with pytest.raises(UserError, match="# @package _global_"):
        check_keys({"experiment": {"data": {"batch_size": 7}}}, ["experiment", "data"])


def test_a_section_that_nothing_reads_is_told():
    """With the nearest one; what an interpolation reads may have any name."""
    with pytest.raises(UserError, match="sets trainr, which nothing reads; did you mean trainer"):
        check_keys({"trainr": {"max_epochs": 1}}, ["trainer"])
    check_keys({"width": 3, "model": {"hidden": ["${width}"]}}, ["model"])


def test_only_the_command_line_names_packages_to_trust():
    """As a list of names."""
    assert typed_targets(["allow_targets=[a,b.c]"]) == ("a", "b.c")
    for wrong in ("allow_targets=null", "allow_targets=3", "allow_targets=[1]", "allow_targets=a"):
        with pytest.raises(UserError, match="must be a list of packages"):
            typed_targets([wrong])
