"""Power of a device under load: constants that turn how busy its memory and its matrix units are into watts.

The curve is in :mod:`meshplan.planner.cluster.power`. Its constants are the same for all devices, shares of the board
limit but for the energy of a bit: fitted to measured runs by ``meshplan calibrate --power`` and shipped as
``seed/power_calibrations.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from meshplan.catalogs.constants.entries import seed_content

POWER_FILE = "power_calibrations.yaml"
# An access to HBM2, activation and I/O included (O'Connor et al., MICRO 2017, doi:10.1145/3123939.3124545).
HBM2_PJ_PER_BIT = 3.92


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerConstants:
    """What a device draws, by what keeps it busy; the defaults are where a fit starts.

    Args:
        waiting_share: power over the board's limit of a device that holds a running engine or job, whatever it does.
        memory_pj_per_bit: energy of a bit of device memory. It hardly differs between generations of HBM, while
            bandwidths grow faster than limits: at its peak rate a B200's memory takes 1.5 times the share of an A100's.
        narrow_share: added where weights of 8 bits or fewer stream at the peak bandwidth: a byte holds more of them to
            be converted and used.
        compute_share: added where matrix units run at their peak rate.
        compute_exponent: the last grows with the utilisation to this power: units that run at a small part of their
            peak rate are clocked and fed all the same.
        bulk_share: added where all that matrix units do at their peak rate are products of many rows: iterations with
            prompts, trainings. It grows with the root of that utilisation. It starts as ``narrow_share`` does: nothing
            published tells it apart.
    """

    waiting_share: float = 0.25
    memory_pj_per_bit: float = HBM2_PJ_PER_BIT
    narrow_share: float = 0.3
    compute_share: float = 1.0
    compute_exponent: float = 0.5
    bulk_share: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCalibration:
    """The constants with what is known of their error.

    Args:
        constants: see :class:`PowerConstants`.
        error_p90: metric (``power``) → 90th percentile of |log(measured/predicted)| on sources held out.
        num_runs: runs behind the fit; 0 where nothing was fitted.
        source: which observations.
        date: day of the fit, ISO 8601.
    """

    constants: PowerConstants = field(default_factory=PowerConstants)
    error_p90: Mapping[str, float] = field(default_factory=dict)
    num_runs: int = 0
    source: str = ""
    date: str = ""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON, all constants by name."""
        return asdict(self)


@cache
def power_calibration() -> PowerCalibration:
    """The set that ships."""
    content = seed_content(POWER_FILE)
    (entry,) = content["calibrations"]
    constants = PowerConstants(**entry["constants"])
    return PowerCalibration(**{**entry, "constants": constants}, source=content["source"], date=str(content["date"]))
