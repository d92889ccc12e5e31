"""A device that is not on this machine, as far as PyTorch tells of its use and of its random numbers."""

from typing import Any

import pytest
import torch


def use_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Let PyTorch say that a kind of device is in use; return its generators, which are ones of the host."""
    generators = [torch.Generator().manual_seed(place) for place in range(1 if kind == "mps" else 2)]
    if kind == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generators[0])
    else:
        backend: Any = getattr(torch, kind)
        monkeypatch.setattr(backend, "is_initialized", lambda: True)
        monkeypatch.setattr(backend, "default_generators", tuple(generators))
    return generators
