"""Watts of serving devices: the work of an iteration, the curve over it, power limits."""
