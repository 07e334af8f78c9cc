"""What this machine is and which versions run on it: stored with every measurement, since numbers depend on them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

CPU_INFO = Path("/proc/cpuinfo")
GPU_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_TOOL_TIMEOUT_S = 10.0


def host_name() -> str:
    """This machine's name; ``MESHPLAN_HOST`` replaces it, for namespaces and containers that share one."""
    return os.environ.get("MESHPLAN_HOST") or platform.node() or "localhost"


def host_environment() -> dict[str, Any]:
    """Processor, clocks, operating system and library versions."""
    return {
        "host": host_name(),
        "cpu": cpu_name(),
        "num_cpus": available_cpus(),
        "cpu_clock_mhz": cpu_clock_mhz(),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "meshplan": own_version(),
    }


def own_version() -> str | None:
    """Version of meshplan; None where it runs without being installed."""
    try:
        return version("meshplan")
    except PackageNotFoundError:
        return None


def available_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def involuntary_switches() -> int:
    """How often the system has taken the processor from this process; 0 where it does not say."""
    try:
        import resource  # Unix only
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def cpu_name() -> str:
    """Model name of the processor."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def cpu_clock_mhz() -> float | None:
    """Present clock of the first processor, MHz; None where the system does not say."""
    text = _cpu_field("cpu MHz")
    return float(text) if text else None


def gpu_environment() -> list[dict[str, str]]:
    """What ``nvidia-smi`` says about each GPU: driver, clocks, power limit; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TOOL_TIMEOUT_S)  # noqa: S603 - fixed arguments
    except (OSError, subprocess.SubprocessError):
        return []
    names = GPU_QUERY.split(",")
    return [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines()]


def version_disagreements(environments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Versions that differ between endpoints, one sentence each; a mixed cluster measures its slowest library."""
    problems = []
    for name in ("python", "numpy", "torch", "nccl", "cuda", "meshplan"):
        by_version: dict[str, list[str]] = {}
        for endpoint, environment in environments.items():
            by_version.setdefault(str(environment.get(name)), []).append(endpoint)
        if len(by_version) > 1:
            shown = "; ".join(f"{version} on {', '.join(who)}" for version, who in sorted(by_version.items()))
            problems.append(f"{name}: {shown}")
    return problems


def _cpu_field(name: str) -> str | None:
    try:
        text = CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else None
