"""Constants that more than one kind of question uses; units of time are in :mod:`meshplan.catalogs.units`."""

from __future__ import annotations

BYTES_16_BIT = 2.0  # one element in bf16 or fp16
