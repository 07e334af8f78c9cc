"""Whole nodes from a market: fleet program, schedules."""
