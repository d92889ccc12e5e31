#!/usr/bin/env bash
# PyTorch 2.15, torch.nn.modules.module.register_module_forward_hook(hook, with_kwargs=True): after the handle's remove()
# the hook is not called any more, but PyTorch still counts it. Every module under torch.compile, called later in the
# process, warns that there are global hooks. Without with_kwargs it does not warn.
#
# Seen: hook called after remove(): no; warnings of a compiled module: 0 after a plain hook, 1 after one with_kwargs.
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
import warnings

import torch
from torch.nn.modules.module import register_module_forward_hook

calls = []


def warned_after_a_removed_hook(**settings):
    handle = register_module_forward_hook(lambda *given: calls.append(given), **settings)
    handle.remove()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    return sum("global hooks" in str(each.message) for each in caught)


plain = warned_after_a_removed_hook()
with_keywords = warned_after_a_removed_hook(with_kwargs=True)
print("hook called after remove():", "yes" if calls else "no")
print(f"warnings of a compiled module: {plain} after a plain hook, {with_keywords} after one with_kwargs.")
assert (len(calls), plain, with_keywords) == (0, 0, 1), (len(calls), plain, with_keywords)
END
