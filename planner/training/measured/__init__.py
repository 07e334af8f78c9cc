"""Published and own training runs: reading, calibration."""
