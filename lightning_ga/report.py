"""Write the page of a run or sweep, or compare several runs: ``python -m lightning_ga.report RUN [RUN…]``.

Tested in tests/test_batch_size.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ga.errors import UserError, printable


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command, by default with the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ga.report", description=__doc__.split(":")[0] + ".")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or sweep, such as outputs/DATE/TIME"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page; report.html if left out")
    arguments = parser.parse_args(argv)
    from lightning_ga.app.page import write_page  # imports matplotlib: not for --help

    try:
        print(printable(write_page(arguments.runs, arguments.output)))
    except (UserError, OSError) as error:
        print(f"Error: {printable(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
