#!/usr/bin/env bash
# litdata 0.2.76, optimize() with an output folder of one's own: before it reads anything, it removes the folders
# "chunks" and "data" in the machine's folder for temporary files, with all that is in them, whoever made them. These
# are its places for work in progress. Their names hold nothing of litdata's, its description on PyPI does not mention
# them, and nothing asks or warns. So what was put into /tmp/data before, such as a downloaded data set, is lost. The
# environment variables DATA_OPTIMIZER_CACHE_FOLDER and DATA_OPTIMIZER_DATA_CACHE_FOLDER give it other folders to
# remove.
#
# Seen, in a folder for temporary files made for this: "data/mine.txt" and "chunks/mine.txt" are gone after optimize(),
# "other/mine.txt" is there. With both variables set, all three are there.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
"$work/venv/bin/pip" install -q litdata==0.2.76
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import os
import tempfile

import litdata

PLACES = {"DATA_OPTIMIZER_CACHE_FOLDER": "chunks", "DATA_OPTIMIZER_DATA_CACHE_FOLDER": "data"}


def kept_by_optimize(name):
    """The folders whose file is still there afterwards."""
    tempfile.tempdir = os.path.abspath(f"temporary_{name}")
    files = {folder: os.path.join(tempfile.tempdir, folder, "mine.txt") for folder in ("data", "chunks", "other")}
    for path in files.values():
        os.makedirs(os.path.dirname(path))
        open(path, "w").close()
    litdata.optimize(
        fn=int, inputs=list(range(10)), output_dir=f"output_{name}", chunk_size=4, num_workers=1, start_method="fork",
        verbose=False,
    )
    return [folder for folder, path in files.items() if os.path.exists(path)]


for variable in PLACES:
    os.environ.pop(variable, None)
kept = kept_by_optimize("shared")
print("kept:", kept)
assert kept == ["other"]

for variable, folder in PLACES.items():
    os.environ[variable] = os.path.abspath(f"own_{folder}")
kept = kept_by_optimize("apart")
print("kept with folders of its own:", kept)
assert kept == ["data", "chunks", "other"]
END
