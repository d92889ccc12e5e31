import re
import subprocess
import sys
from pathlib import Path

import lightning_ga

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


def test_nothing_private_of_hydra_and_omegaconf_is_touched():
    private = re.compile(r"\b(hydra|omegaconf)(\.\w+)*\._\w|from (hydra|omegaconf)[\w.]* import _")
    files = [*Path(lightning_ga.__file__).parent.rglob("*.py")]
    assert len(files) > 50
    assert [file.name for file in files if private.search(file.read_text(encoding="utf-8"))] == []
