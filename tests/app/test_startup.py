import subprocess
import sys

HEAVY = {"torch", "lightning", "timm", "torchvision", "sklearn", "matplotlib", "rich", "numpy"}
CODE = """
import contextlib, io, sys
from lightning_ga.train import main
for arguments in {lines!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
print(sorted({heavy!r} & set(sys.modules)))
"""
LINES = [["--help"], ["--version"], ["--cfg", "job"], ["trainer.max_epoch=3"], ["model=nope"], ["seed=abc"]]


def test_what_needs_no_training_imports_nothing_heavy(tmp_path):
    line = [sys.executable, "-c", CODE.format(lines=LINES, heavy=HEAVY)]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert run.stderr.count("Error: ") == 3
