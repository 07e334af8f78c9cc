"""Weights and KV caches of serving beyond device memory."""
