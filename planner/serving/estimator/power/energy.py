"""Average power of a serving device, from how busy its memory and its matrix units are.

With u the shares of time for which a device would be busy at its peak rates (reading 16-bit weights and KV cache,
reading narrower weights, multiplying; :mod:`meshplan.planner.serving.estimator.power.work`), it asks for the share::

    a = waiting + memory·u_wide + narrow·u_narrow + compute·u_compute^exponent
    P = limit·a / (1 + a^k)^(1/k)

of its board limit, and the board holds it there: k is large, so that P follows a until the limit. The utilisations are
means over time, waiting included: held out, (model, device) groups are met better so than by a curve for each kind of
iteration, as boards limit averages over more than one iteration. Constants, source and error:
:mod:`meshplan.catalogs.constants.power`.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.constants.power import PowerConstants
from meshplan.catalogs.hardware import Device
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.power.work import DeviceWork

# k of the limit: asked for 90 % of it a board gives 2 % less, for 100 % 6 % less; measured averages reach 98 %.
LIMIT_SHARPNESS = 12.0


def power_share(constants: PowerConstants, use: DeviceWork) -> FloatArray:
    """Average power over the board's own limit.

    Args:
        constants: of the curve.
        use: utilisations: work in a time over that time.

    >>> idle = DeviceWork(wide_s=np.zeros(1), narrow_s=np.zeros(1), compute_s=np.zeros(1))
    >>> power_share(PowerConstants(waiting_share=0.25), idle).round(3).tolist()
    [0.25]
    """
    asked = (
        constants.waiting_share
        + constants.memory_share * np.minimum(use.wide_s, 1.0)
        + constants.narrow_share * np.minimum(use.narrow_s, 1.0)
        + constants.compute_share * np.minimum(use.compute_s, 1.0) ** constants.compute_exponent
    )
    return _held(asked, 1.0)


def average_power_w(
    device: Device, constants: PowerConstants, use: DeviceWork, *, cap_w: float | None = None
) -> float | None:
    """Average power of a device, W; None without a known limit.

    Args:
        device: the board.
        constants: of the curve.
        use: utilisations. Under a lower limit they are those of a slower device: see :mod:`.cap`.
        cap_w: power limit that is set, W; None for the board's own.
    """
    if device.tdp_w is None:
        return None
    share = power_share(constants, use)
    return device.tdp_w * float(share if cap_w is None else capped_share(share, cap_w / device.tdp_w))


def capped_share(share: FloatArray, cap_share: float) -> FloatArray:
    """Average power under a lower limit, both over the board's own.

    A board below the limit keeps its clock, so that a limit saves nothing where the load is low; one that asks for more
    is held where :data:`LIMIT_SHARPNESS` says that a board stays which asks for just its limit. Of 290 published epochs
    under limits that bind (Zeus, see :mod:`.cap`) power is met within 3 % and energy within 7 % (medians).

    >>> capped_share(np.array([0.4, 0.6, 0.9]), 0.6).round(3).tolist()
    [0.4, 0.566, 0.566]
    """
    return _held(np.minimum(share, cap_share), cap_share)


def _held(asked: FloatArray, limit: float) -> FloatArray:
    """P of the module's equation."""
    return np.asarray(asked / (1.0 + (asked / limit) ** LIMIT_SHARPNESS) ** (1.0 / LIMIT_SHARPNESS))
