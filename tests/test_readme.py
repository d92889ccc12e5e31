"""What README.md says of a small device, and where its links lead; that its code runs is in tests/docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_somewhere():
    """To files of this repository, and to their headings."""
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert [path for path, _, _ in targets if not (ROOT / path).exists()] == []
    for path, _, heading in targets:
        titles = re.findall(r"^#+ (.*)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        assert not heading or heading in [
            re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles
        ], (path, heading)


@pytest.mark.slow
def test_the_small_device_gives_the_same_result(command):
    """The two commands of the second chapter come to the same numbers, here after an epoch."""
    whole, small = re.findall(r'make train ARGS="(trainer=cpu model=mlp data.batch_size=256.*)"', README)
    results = []
    for name, line in (("whole", whole), ("small", small)):
        run = command(*line.split(), "trainer.max_epochs=1", folder=name)
        assert run.code == 0, run.err
        results.append([float(x) for x in re.search(r"test/acc (\S+), test/loss (\S+),", run.out).groups()])
    assert results[0] == pytest.approx(results[1], rel=2e-3)  # rounding: sums have another order
    assert "256 = 86 + 85 + 85, factor 3" in run.out
    assert "119 samples per micro-batch" in run.out
    shown = re.search(r"```\n( training .*?)```", README, flags=re.DOTALL)[1]
    of_the_machine = re.compile(r"\d+\.\d s$|\d\.\de-\d\d:", re.MULTILINE)  # time, and rounding
    told = "\n".join(line.removeprefix(" ").rstrip() for line in run.out.splitlines())
    assert of_the_machine.sub("", shown) in of_the_machine.sub("", told)
