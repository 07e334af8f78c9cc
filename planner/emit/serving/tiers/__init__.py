"""Weights and prefixes beyond device memory, in the words of engines."""
