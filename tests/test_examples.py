"""The examples run as they are printed, and train the same whatever the budget."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints, in a process of its own."""
    line = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "all_ranks"),
    [
        ("plain_pytorch.py", [[]]),
        pytest.param("fabric.py", [[], ["--devices", "2"]], marks=pytest.mark.distributed),
    ],
)
def test_loops_without_a_trainer_train_the_same_within_any_budget(name: str, all_ranks: list[list[str]]) -> None:
    """Micro-batches of what fits give the losses of whole batches, ragged windows included."""
    whole = run(name, "--memory-budget", "200MiB", "--max-epochs", "3")
    assert number(r"factor (\d+)", whole) == 1
    expected = number(r"loss of the last epoch (\S+)", whole)
    assert expected < 0.5
    for ranks in all_ranks:
        small = run(name, "--memory-budget", "3MiB", "--max-epochs", "3", *ranks)
        assert number(r"factor (\d+)", small) >= 3
        assert "found in 4 steps" in small
        assert number(r"loss of the last epoch (\S+)", small) == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_a_module_of_ones_own() -> None:
    """One line in the Trainer, and the batch stays what was asked for."""
    printed = run("own_model.py", "--max-epochs", "2")
    assert "effective batch 256" in printed
    assert number(r"validation accuracy (\S+)", printed) > 0.5


@pytest.mark.slow
def test_lightning_cli() -> None:
    """The callback in a YAML file."""
    pytest.importorskip("jsonargparse")
    run("lightning_cli.py", "fit", "--config", str(EXAMPLES / "lightning_cli.yaml"), "--trainer.max_epochs", "1")
