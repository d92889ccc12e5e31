"""The examples run as they are printed, and train the same whatever the budget."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from forks import forked

EXAMPLES = Path(__file__).parents[1] / "examples"


def execute(path: str, *arguments: str) -> None:
    """The file as ``python`` runs it."""
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run(folder: Path, name: str, *arguments: str) -> str:
    """What an example prints, in a process of its own."""
    done = forked(execute, str(EXAMPLES / name), *arguments, folder=folder)
    assert done.code == 0, done.output
    return done.output


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("plain_pytorch.py", []),
        pytest.param("fabric.py", ["--devices", "2"], marks=[pytest.mark.distributed, pytest.mark.slow]),
    ],
)
def test_loops_without_a_trainer_train_the_same_within_any_budget(name: str, ranks: list[str], tmp_path: Path) -> None:
    """Micro-batches of what fits give the losses of whole batches, ragged windows included."""
    whole = run(tmp_path, name, "--memory-budget", "200MiB", "--max-epochs", "3")
    assert number(r"(?:factor|×) (\d+)", whole) == 1
    expected = number(r"loss of the last epoch (\S+)", whole)
    assert expected < 0.5
    small = run(tmp_path, name, "--memory-budget", "3MiB", "--max-epochs", "3", *ranks)
    assert number(r"(?:factor|×) (\d+)", small) >= 3
    assert "found in 4 steps" in small
    assert number(r"loss of the last epoch (\S+)", small) == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_a_contrastive_loss_over_a_window_that_does_not_fit(tmp_path: Path) -> None:
    """Whole batches and chunks end at the same loss."""
    printed = run(tmp_path, "contrastive.py", "--epochs", "1", "--picture", str(tmp_path / "a.png"))
    last = [float(row.split("│")[3]) for row in printed.splitlines() if row.startswith("│ whole")]
    assert last[0] == pytest.approx(last[1], abs=2e-3)
    assert "effective batch 1,024 in one loss, encoder in 12 chunks of 86; found in 5 steps" in printed
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    printed = run(tmp_path, "own_model.py", "--max-epochs", "2")
    assert "effective batch 256" in printed
    assert number(r"validation accuracy (\S+)", printed) > 0.5


def test_lightning_cli(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    config = str(EXAMPLES / "lightning_cli.yaml")
    printed = run(tmp_path, "lightning_cli.py", "fit", "--config", config, "--trainer.max_epochs", "1")
    assert "AutoAccumulate: effective batch" in printed


def test_a_loop_by_hand(tmp_path: Path) -> None:
    """tests/examples/test_custom_loop.py holds that it goes on where it was killed."""
    arguments = ("--rows", "500", "--memory-budget", "20MiB", "--checkpoint-every", "2", "--steps", "2")
    assert "2 optimizer steps" in run(tmp_path, "custom_loop.py", *arguments)


def test_more_passes_do_not_make_batch_norm_exact(tmp_path: Path) -> None:
    """Each pass makes one layer's statistics right; the gradient is wrong even if all are, and worse than before."""
    printed = run(tmp_path, "pooled_batch_norm.py")
    separate = number(r"each micro-batch +error of the gradient (\S+)", printed)
    errors = re.findall(r"pooled in (\d+) passes, (\d+) of 7 right +error of the gradient (\S+)", printed)
    assert [(int(passes), int(right)) for passes, right, _ in errors] == [(count, count) for count in range(1, 8)]
    assert min(float(error) for _, _, error in errors) > separate > 0.1
