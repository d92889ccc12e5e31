#!/usr/bin/env bash
# PyTorch 2.15.0: the first function that runs under torch.compile switches off the validation of arguments of
# torch.distributions, for the whole process and for good, also in eager code that has nothing to do with it. A negative
# alpha of mixup, for example, is refused with a ValueError before, and is accepted after. Nothing is said. The setting
# can be switched on again: torch.distributions.Distribution.set_default_validate_args(True).
#
# Seen: Beta(-1, -1) raises a ValueError; then a function of one addition runs compiled (backend "eager"); then
# Beta(-1, -1) is made, also after the compiler was reset.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
if [ -n "${TORCH_FROM:-}" ]; then # site-packages with PyTorch and its dependencies, to save gigabytes
    echo "$TORCH_FROM" > "$(echo "$work"/venv/lib/python3.*/site-packages)/torch.pth"
else
    "$work/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
fi
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'END'
import torch
from torch.distributions import Beta, Distribution


def is_refused():
    try:
        Beta(-1.0, -1.0)
    except ValueError:
        return True
    return False


before = is_refused()
torch.compile(lambda values: values + 1, backend="eager")(torch.ones(1))
after = is_refused()
torch.compiler.reset()
reset = is_refused()
Distribution.set_default_validate_args(True)
print("refused: before", before, "after a compiled call", after, "after a reset", reset, "switched on", is_refused())
assert (before, after, reset, is_refused()) == (True, False, False, True)
END
