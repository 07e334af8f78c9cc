"""Placements that keep tokens on a device, and migrations."""
