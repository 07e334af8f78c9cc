"""Measured figures out of load generators, training logs and memory statistics."""
