#!/bin/sh
# run.sh PYTHON ARGUMENTS...: run Python with a simulated CUDA device; exits with 77 where it cannot be built.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
built=$("$1" "$here/build.py") || exit 77
export PYTHONPATH="$here:$built${PYTHONPATH:+:$PYTHONPATH}" LD_LIBRARY_PATH="$built${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_PRELOAD="$built/libsimulated_cuda.so"
exec "$@"
