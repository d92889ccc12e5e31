"""What answers cost that need no training: process time and memory of the command line.

    python -m benchmarks.command_line

CPU seconds of the process and its largest resident memory, both from the operating system; the least of
three runs. Not wall time: other work on the machine does not change them by much.
"""

import os
import subprocess
import sys
import tempfile

QUESTIONS = (("--version",), ("--help",), ("--cfg", "job"), ("trainer.max_epoch=3",), ("model=nope",), ("seed=abc",))
RUNS = 3


def cost(arguments: tuple[str, ...], folder: str) -> tuple[float, float]:
    """CPU seconds and MiB of one answer."""
    line = [sys.executable, "-m", "lightning_ga.train", *arguments]
    with subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / (1024 if sys.platform != "darwin" else 2**20)


def main() -> None:
    print(f"{'lightning-ga':24} {'CPU s':>6} {'MiB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for arguments in QUESTIONS:
            seconds, memory = min(cost(arguments, folder) for _ in range(RUNS))
            print(f"{' '.join(arguments):24} {seconds:6.2f} {memory:6.0f}")


if __name__ == "__main__":
    main()
