"""Average power of serving devices, as a share of the board's power limit.

Prefill is compute-bound and runs at the limit, decode is memory-bound and runs below it. The shares are medians of the
peak and of the average over the Splitwise profiles, whose time is nearly all decode (Patel et al., ISCA 2024,
arXiv:2311.18677; A100, 2 to 8 devices, 44 configurations: peak 1.01, average 0.61 of the limit).
"""

from __future__ import annotations

from meshplan.catalogs.hardware import Device

PREFILL_POWER_SHARE = 1.0
DECODE_POWER_SHARE = 0.61


def average_power_w(device: Device, prefill_share: float) -> float | None:
    """Average power of a busy device that prefills for ``prefill_share`` of its time, W; None without a known limit."""
    if device.tdp_w is None:
        return None
    share = min(max(prefill_share, 0.0), 1.0)
    return device.tdp_w * (share * PREFILL_POWER_SHARE + (1.0 - share) * DECODE_POWER_SHARE)
