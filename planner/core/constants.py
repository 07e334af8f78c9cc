"""Constants that more than one kind of question uses; units of time are in :mod:`meshplan.catalogs.units`."""

from __future__ import annotations

BYTES_16_BIT = 2.0  # one element in bf16 or fp16
# Share of measurements that an interval is to hold unless it says otherwise, and the quantiles at its two ends.
INTERVAL_SHARE = 0.9
INTERVAL_ENDS = (0.05, 0.95)
# Student's quantile of a two-sided 95 % interval, by degrees of freedom from 1 to 19: of the mean of two to 20 samples.
STUDENT_95 = (
    *(12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
