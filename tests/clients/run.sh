#!/usr/bin/env bash
# Try other projects' programs with AutoAccumulate: tests/clients/run.sh [VENV] [CLIENT …]
#
# VENV is made and filled if need be (about 7 GB, once; default tests/clients/.venv). The table goes to the screen,
# to docs/results/clients.md and, with all numbers, to tests/clients/table.json; if clients are named, beside the last
# rows of the others. The exit code is 1 if a row is wrong.
set -euo pipefail
folder=$(realpath "$(dirname "$0")")
venv=${1:-$folder/.venv}
cd "$folder/../.."
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check \
    -c constraints.txt -e . -r tests/clients/requirements.txt
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH=tests${PYTHONPATH:+:$PYTHONPATH}
exec "$venv/bin/python" -m clients "${@:2}"
