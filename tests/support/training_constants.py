"""Constants of training that a test sets."""

from __future__ import annotations

from dataclasses import replace

from meshplan.catalogs.constants.training import Calibration, Constant


def with_time(calibration: Calibration, **constants: Constant) -> Calibration:
    """A copy with other time constants."""
    return replace(calibration, time=replace(calibration.time, **constants))
