"""Constants that more than one kind of question uses; units of time are in :mod:`meshplan.catalogs.units`."""

from __future__ import annotations

BYTES_16_BIT = 2.0  # one element in bf16 or fp16
# Share of measurements that an interval is to hold unless it says otherwise, and the quantiles at its two ends.
INTERVAL_SHARE = 0.9
INTERVAL_ENDS = (0.05, 0.95)
