"""Power of a device under load: constants that turn how busy its memory and its matrix units are into watts.

The curve is in :mod:`meshplan.planner.cluster.power`. Its constants are shares of the board limit,
the same for all devices: fitted to measured runs by ``meshplan calibrate --power`` and shipped as
``seed/power_calibrations.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from meshplan.catalogs.constants.entries import seed_content

POWER_FILE = "power_calibrations.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerConstants:
    """Power over the board's limit, by what keeps the device busy; the defaults are where a fit starts.

    Args:
        waiting_share: of a device that holds a running engine or job, whatever it does.
        memory_share: added where what is 16 bits wide or wider streams at the peak bandwidth.
        narrow_share: added where weights of 8 bits or fewer do: a byte holds more of them to be converted and used.
        compute_share: added where matrix units run at their peak rate.
        compute_exponent: the last grows with the utilisation to this power: units that run at a small part of their
            peak rate are clocked and fed all the same.
    """

    waiting_share: float = 0.25
    memory_share: float = 0.3
    narrow_share: float = 0.3
    compute_share: float = 1.0
    compute_exponent: float = 0.5


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
