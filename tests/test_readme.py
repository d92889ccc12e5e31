"""What stands in README.md to be copied works; tests/docs has the other pages."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def command_lines() -> list[str]:
    """The arguments of every command line of ours, made by make or typed."""
    unbroken = [re.sub(r"\\\n\s*", "", block) for block in blocks("sh")]
    lines = [line.split("  #")[0].strip() for block in unbroken for line in block.splitlines()]
    typed = [
        line.partition("lightning_ga.train ")[2] for line in lines if line.startswith("python -m lightning_ga.train")
    ]
    made = [match[1] for line in lines if (match := re.match(r'make train ARGS="(.*)"', line))]
    return [*typed, *made]


@pytest.mark.filterwarnings("ignore:.*_dataloader.* has:UserWarning")
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_blocks_run(code: str, monkeypatch, tmp_path, capsys, caplog):
    """As they are printed."""
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "within 0" not in caplog.text
    assert "43, 43, 42" in capsys.readouterr().out or "AutoAccumulate(" in code


def test_links_lead_somewhere():
    """To files of this repository, and to their headings."""
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert [path for path, _, _ in targets if not (ROOT / path).exists()] == []
    for path, _, heading in targets:
        titles = re.findall(r"^#+ (.*)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        assert not heading or heading in [
            re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles
        ], (path, heading)


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_compose(line: str, command):
    """Every override exists; sweeps are composed by their first values."""
    arguments = [re.sub(r"^([\w.]+=[^,{]+),.*", r"\1", part) for part in shlex.split(line) if part != "-m"]
    run = command("--cfg", "job", "--resolve", *arguments, "paths.output_dir=run")
    assert run.code == 0, run.err


def test_the_small_device_gives_the_same_result(command):
    """The two commands of the second chapter come to the same numbers, here after an epoch."""
    whole, small = (line for line in command_lines() if line.startswith("trainer=cpu model=mlp data.batch_size=256"))
    results = []
    for name, line in (("whole", whole), ("small", small)):
        run = command(*line.split(), "trainer.max_epochs=1", folder=name)
        assert run.code == 0, run.err
        results.append([float(x) for x in re.search(r"test/acc (\S+), test/loss (\S+),", run.out).groups()])
    assert results[0] == pytest.approx(results[1], rel=2e-3)  # rounding: sums have another order
    assert "256 = 86 + 85 + 85, factor 3" in run.out
    assert "119 samples per micro-batch" in run.out
    shown = re.search(r"```\n( training .*?)```", README, flags=re.DOTALL)[1]
    of_the_machine = re.compile(r"\d+\.\d s \(|\d\.\de-\d\d:")  # time, and rounding
    told = "\n".join(line.removeprefix(" ").rstrip() for line in run.out.splitlines())
    assert of_the_machine.sub("", shown) in of_the_machine.sub("", told)
