"""Enumeration with bounds over degrees, layers and rank placement."""
