"""Physical constants and units that more than one kind of question uses."""

from __future__ import annotations

BYTES_16_BIT = 2.0  # of one element in bf16 or fp16
SECONDS_PER_HOUR = 3600.0
