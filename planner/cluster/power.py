"""Average power of a device, from how busy its memory and its matrix units are.

With u the shares of time for which a device would be busy at its peak rates (moving what is 16 bits wide or wider,
reading narrower weights, multiplying, and of that multiplying many rows at once), it asks for the share::

    a = waiting + ε·(bandwidth/limit)·(u_wide + u_narrow) + narrow·u_narrow + compute·u_compute^exponent + bulk·√u_bulk
    P = limit·a / (1 + a^k)^(1/k)

of its board limit, and the board holds it there: k is large, so that P follows a until the limit. ε is the energy of a
byte. The utilisations are
means over time, waiting included: held out, (model, device) groups are met better so than by a curve for each kind of
iteration, as boards limit averages over more than one iteration. What iterations with prompts multiply takes more than
the same done by decodes: units that are fed many rows toggle at their full rate for a while, which a mean hides.
Constants, source and error:
:mod:`meshplan.catalogs.constants.power`. What serving keeps busy: :mod:`meshplan.planner.serving.estimator.power.work`;
what a training step does: :mod:`meshplan.planner.training.estimator.energy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.power import PowerConstants
from meshplan.catalogs.hardware import Device
from meshplan.planner.core.arrays import FloatArray

# k of the limit: asked for 90 % of it a board gives 2 % less, for 100 % 6 % less; measured averages reach 98 %.
LIMIT_SHARPNESS = 12.0
# u_bulk counts to this power: where the fit of the other exponent starts. From 0.4 to 0.7 rows held out are met alike.
BULK_EXPONENT = 0.5
# Joules a byte for one picojoule a bit.
J_PER_BYTE = 8e-12
# Relative width at which halving an interval of times ends.
SAME_TIME = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """Work of one device, each in seconds at its peak rate; numbers or arrays of one shape.

    Divided by the time that it took: utilisations.

    Args:
        wide_s: reading and writing 16-bit weights, KV cache, activations, optimizer states.
        narrow_s: reading weights of 8 bits or fewer.
        compute_s: multiplying.
        bulk_s: of that, in iterations with prompts and in training, whose products have many rows.
    """

    wide_s: FloatArray
    narrow_s: FloatArray
    compute_s: FloatArray
    bulk_s: FloatArray

    def times(self, factor: FloatArray | float) -> DeviceWork:
        """So many times the work; divide by a time for utilisations."""
        return self._each(lambda part: part * factor)

    def sum(self) -> DeviceWork:
        """All of an array."""
        return self._each(np.sum)

    def at(self, place: float, places: FloatArray) -> DeviceWork:
        """Interpolated between rising places; the ends go on as they are."""
        return self._each(lambda part: np.asarray(np.interp(place, places, part)))

    def _each(self, change: Callable[[FloatArray], FloatArray]) -> DeviceWork:
        return DeviceWork(**{name: change(getattr(self, name)) for name in self.__dataclass_fields__})


def peak_bytes_per_j(device: Device) -> float:
    """Bytes that the memory moves at its peak rate while the board takes a joule at its limit; NaN where that limit is
    unknown.
    """
    return math.nan if device.tdp_w is None else device.memory_bandwidth_bytes_per_s / device.tdp_w


def power_share(constants: PowerConstants, use: DeviceWork, bytes_per_j: FloatArray | float) -> FloatArray:
    """Average power over the board's own limit.

    Args:
        constants: of the curve.
        use: utilisations: work in a time over that time.
        bytes_per_j: :func:`peak_bytes_per_j` of the device.

    >>> idle = DeviceWork(**dict.fromkeys(("wide_s", "narrow_s", "compute_s", "bulk_s"), np.zeros(1)))
    >>> power_share(PowerConstants(waiting_share=0.25), idle, 5e9).round(3).tolist()
    [0.25]
    """
    wide, narrow = np.minimum(use.wide_s, 1.0), np.minimum(use.narrow_s, 1.0)
    asked = (
        constants.waiting_share
        + constants.memory_pj_per_bit * J_PER_BYTE * bytes_per_j * (wide + narrow)
        + constants.narrow_share * narrow
        + constants.compute_share * np.minimum(use.compute_s, 1.0) ** constants.compute_exponent
        + constants.bulk_share * np.minimum(use.bulk_s, 1.0) ** BULK_EXPONENT
    )
    return _held(asked, 1.0)


def average_power_w(
    device: Device, constants: PowerConstants, use: DeviceWork, *, cap_w: float | None = None
) -> float | None:
    """Average power of a device, W; None without a known limit.

    Args:
        device: the board.
        constants: of the curve.
        use: utilisations. Under a lower limit they are those of a slower device.
        cap_w: power limit that is set, W; None for the board's own.
    """
    if device.tdp_w is None:
        return None
    share = power_share(constants, use, peak_bytes_per_j(device))
    return device.tdp_w * float(share if cap_w is None else capped_share(share, cap_w / device.tdp_w))


def energy_over_limit_s(
    constants: PowerConstants, work: DeviceWork, seconds: FloatArray | float, bytes_per_j: float
) -> FloatArray:
    """Energy of some work in some time over the board's limit, s: T·P(w/T) of the module's equation.

    Of n devices alike: n times the work in n times the time, device-seconds.

    *It never falls as the time or the work grows*, for 0 ≤ exponent ≤ 1. With w the work and e the exponent,
    ``T·a = waiting·T + m·min(w_wide, T) + (m + narrow)·min(w_narrow, T) + compute·min(w_compute, T)^e·T^(1−e) +
    bulk·√(min(w_bulk, T)·T)`` with m = ε·bandwidth/limit grows with T and each w, while a falls with T; so
    T·P = T·a/(1 + a^k)^(1/k) grows with T. P grows with a, a with each w.

    Args:
        constants: of the curve.
        work: w.
        seconds: T; where it is infinite, so is the energy.
        bytes_per_j: :func:`peak_bytes_per_j` of the device.

    >>> busy = DeviceWork(wide_s=np.zeros(1), narrow_s=np.zeros(1), compute_s=np.ones(1), bulk_s=np.zeros(1))
    >>> energy_over_limit_s(PowerConstants(), busy, np.array([1.0, 2.0, 4.0]), 5e9).round(2).tolist()
    [0.99, 1.84, 2.99]
    """
    return np.asarray(seconds * power_share(constants, work.times(1.0 / np.asarray(seconds)), bytes_per_j))


def longest_s(constants: PowerConstants, work: DeviceWork, energy_over_limit: float, bytes_per_j: float) -> float:
    """The longest time in which some work takes no more than an energy over the board's limit, s, from above.

    The inverse of :func:`energy_over_limit_s` in its time, by halving: a board draws between what waiting takes and its
    limit.

    >>> idle = DeviceWork(**dict.fromkeys(("wide_s", "narrow_s", "compute_s", "bulk_s"), np.zeros(())))
    >>> round(longest_s(PowerConstants(waiting_share=0.25), idle, 1.0, 5e9), 6)
    4.0
    """
    if not 0.0 < energy_over_limit < math.inf:
        return energy_over_limit
    waiting = float(_held(np.asarray(constants.waiting_share), 1.0))
    shortest, longest = energy_over_limit, energy_over_limit / waiting
    while longest - shortest > SAME_TIME * longest:
        middle = (shortest + longest) / 2.0
        if float(energy_over_limit_s(constants, work, middle, bytes_per_j)) <= energy_over_limit:
            shortest = middle
        else:
            longest = middle
    return longest


def capped_share(share: FloatArray, cap_share: float) -> FloatArray:
    """Average power under a lower limit, both over the board's own.

    A board below the limit keeps its clock, so that a limit saves nothing where the load is low; one that asks for more
    is held where :data:`LIMIT_SHARPNESS` says that a board stays which asks for just its limit. Of 290 published epochs
    under limits that bind (Zeus, NSDI 2023) power is met within 3 % and energy within 7 % (medians).

    >>> capped_share(np.array([0.4, 0.6, 0.9]), 0.6).round(3).tolist()
    [0.4, 0.566, 0.566]
    """
    return _held(np.minimum(share, cap_share), cap_share)


def _held(asked: FloatArray, limit: float) -> FloatArray:
    """P of the module's equation."""
    return np.asarray(asked / (1.0 + (asked / limit) ** LIMIT_SHARPNESS) ** (1.0 / LIMIT_SHARPNESS))
