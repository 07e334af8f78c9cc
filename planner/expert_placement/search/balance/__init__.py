"""Placements that even out the load."""
