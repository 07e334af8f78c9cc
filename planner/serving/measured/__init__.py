"""Published and own serving runs: reading, validation, calibration."""
