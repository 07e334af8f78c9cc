"""Sequences of different lengths: distributions, packing, balanced assignment, context-parallel groups by length."""
