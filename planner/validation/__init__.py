"""Measured runs against predictions: fields, machines, summaries."""
