import sys
from pathlib import Path

import pytest
from forks import forked

import lightning_ga

HEAVY = {"torch", "lightning", "timm", "torchvision", "sklearn", "matplotlib", "rich", "pandas", "numpy"}


def imported_by(arguments: list[str]) -> int:
    """Answer on the command line in a fresh interpreter, and count what was imported that training needs."""
    import subprocess

    code = f"import sys\nfrom lightning_ga.train import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    root = str(Path(lightning_ga.__file__).parent.parent)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root})
    print(run.stdout.strip().splitlines()[-1])
    return run.returncode


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["--cfg", "job"], ["trainer.max_epoch=3"], ["model=nope"], ["seed=abc"]]
)
def test_what_needs_no_training_imports_nothing_heavy(tmp_path, arguments):
    """Help, version, configuration, a typo and a wrong value answer at once."""
    ended = forked(imported_by, arguments, folder=tmp_path)
    assert (ended.code, ended.output) == (0, "[]\n")
