"""Measured peaks of memory: what a source reports of them, their parts, and the constants and bounds fitted to them."""
