"""Recorded requests from a CSV file."""

from __future__ import annotations

from pathlib import Path

from meshplan.planner.problems.serving import Requests


def read_trace(path: Path) -> Requests:
    """Placeholder until the reader is merged."""
    raise NotImplementedError(path)
