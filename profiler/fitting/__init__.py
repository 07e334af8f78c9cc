"""Curves and surfaces fitted to measurements."""
