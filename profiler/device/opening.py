"""Chooses the backend of the device probes by name, or the best that this machine has."""

from __future__ import annotations

import importlib.util

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.device.backends import Backend
from meshplan.profiler.device.numpy_backend import NumpyBackend
from meshplan.profiler.device.torch_backend import TorchBackend


def open_backend(name: str = "auto", *, seed: int = 0) -> Backend:
    """A backend by name; ``auto`` takes a GPU through torch, else torch on the CPU, else NumPy.

    Raises:
        ProfileError: unknown, or not available here.
    """
    match name:
        case "numpy":
            return NumpyBackend(seed=seed)
        case "torch-cpu":
            return TorchBackend("cpu", seed=seed)
        case "torch-gpu":
            return TorchBackend("cuda", seed=seed)
        case "auto":
            if importlib.util.find_spec("torch") is None:
                return NumpyBackend(seed=seed)
            import torch  # optional, and slow to import

            return TorchBackend("cuda" if torch.cuda.is_available() else "cpu", seed=seed)
    raise ProfileError(f"unknown backend {name!r}; one of auto, numpy, torch-cpu, torch-gpu")
