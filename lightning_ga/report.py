"""Write the page of a run or sweep: ``python -m lightning_ga.report RUN``.

Tested in tests/app/test_page.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ga.errors import UserError, printable


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run or sweep, by default into its folder."""
    from lightning_ga.app.page import PAGE, run_page  # import matplotlib: not for --help
    from lightning_ga.app.run_files import read_run, read_sweep, write_text
    from lightning_ga.app.sweep_report import sweep_page

    place = path or folder / PAGE
    sweep = read_sweep(folder)
    if sweep is None:
        write_text(place, run_page(read_run(folder)))
    else:
        write_text(place, sweep_page(folder, sweep))
    return place


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command, by default with the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ga.report", description=__doc__.split(":")[0] + ".")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run or sweep, such as outputs/DATE/TIME")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page; report.html in the folder if left out")
    arguments = parser.parse_args(argv)
    try:
        print(printable(write_page(arguments.run, arguments.output)))
    except (UserError, OSError) as error:
        print(f"Error: {printable(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
