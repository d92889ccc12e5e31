"""Which operators of the simulated device compute values, by the CPU's kernels; cuDNN is not simulated.

``sh tests/simulated_cuda/run.sh PYTHON tests/simulated_cuda/device_values.py benchmarks.gpu --quick`` runs a module
with PyTorch's own kernels, which compute nothing; with ``SIMULATED_CUDA_VALUES=none`` all of them.
"""

import importlib
import os
import runpy
import sys
from typing import Any

import torch


def of_all_operators() -> None:
    """Right values, and none of PyTorch's kernels: attention is written out, as its fused kernels have no values."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    extension = _extension()
    extension.uninstall()
    extension.install()


def only_what_is_read() -> None:
    """PyTorch's own kernels, but for what Lightning, a gradient scaler and checksums of weights read."""
    extension = _extension()
    extension.uninstall()
    extension.install({"fill_", "eq", "sum", "add", "cat"})


def _extension() -> Any:
    """The extension that computes values, once PyTorch knows the device."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.init()
    return importlib.import_module("simulated_values")


if __name__ == "__main__":
    if os.environ.get("SIMULATED_CUDA_VALUES") == "none":  # nothing is written to memory: large steps take none of it
        _extension()
    else:
        only_what_is_read()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
