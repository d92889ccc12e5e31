"""Put the tables of ``benchmarks/results`` into the documentation: ``python -m benchmarks.quote``.

A table stands between ``<!-- benchmark: NAME -->`` and ``<!-- end -->``.
"""

import re
import sys
from pathlib import Path

from benchmarks import (
    allocator,
    batch_norm,
    chaos,
    coupled,
    exchange,
    fidelity,
    idle,
    lengths,
    noise_scale,
    overhead,
    planning,
    probe,
    random_cells,
    sampler,
    schedules,
    startup,
    training,
)
from benchmarks.output import read_json

TEXTS = {
    "allocator": allocator.text,
    "batch_norm": batch_norm.text,
    "chaos": chaos.text,
    "coupled": coupled.text,
    "exchange": exchange.text,
    "fidelity": fidelity.text,
    "idle": idle.text,
    "lengths": lengths.text,
    "noise_scale": noise_scale.text,
    "overhead": overhead.text,
    "planning": planning.text,
    "probe": probe.text,
    "random_cells": random_cells.text,
    "sampler": sampler.text,
    "schedules": schedules.text,
    "startup": startup.text,
    "training": training.text,
}
PAGES = tuple(sorted((Path(__file__).parents[1] / "docs" / "results").glob("*.md")))
_PLACE = re.compile(r"(<!-- benchmark: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def quoted(page: str) -> str:
    """The page with its tables as the last run of each benchmark wrote them."""

    def fill(place: re.Match[str]) -> str:
        name = place[2]
        return f"{place[1]}```text\n{TEXTS[name](read_json(name))}\n```\n{place[3]}"

    return _PLACE.sub(fill, page)


def main() -> int:
    for page in PAGES:
        page.write_text(quoted(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
