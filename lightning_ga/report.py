"""Write the page of a run or sweep, or compare several runs: ``python -m lightning_ga.report RUN [RUN…]``.

Tested in tests/app/test_page.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ga.errors import UserError, printable


def write_page(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of one run or sweep, by default into its folder, or of all of several folders that contain one."""
    from lightning_ga.app.page import PAGE, comparison_page, run_page  # import matplotlib: not for --help
    from lightning_ga.app.run_files import CONFIG, read_run, read_sweep, write_text
    from lightning_ga.app.sweep_report import sweep_page

    sweep = read_sweep(folders[0])
    with_runs = [folder for folder in folders if (folder / CONFIG).is_file()]
    if sweep is not None and len(folders) == 1:
        text = sweep_page(folders[0], sweep)
    elif len(with_runs) > 1:
        text = comparison_page([*map(read_run, with_runs)])
    else:
        text = run_page(read_run(next(iter(with_runs), folders[0])))
    home = folders[0] if len(folders) == 1 else Path()
    place = path or home / PAGE
    write_text(place, text)
    return place


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command, by default with the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ga.report", description=__doc__.split(":")[0] + ".")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or sweep, such as outputs/DATE/TIME"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page; report.html if left out")
    arguments = parser.parse_args(argv)
    try:
        print(printable(write_page(arguments.runs, arguments.output)))
    except (UserError, OSError) as error:
        print(f"Error: {printable(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
