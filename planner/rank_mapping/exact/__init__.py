"""Exact rank mapping for few nodes: ranges of the ring time, each searched by the cheaper of two enumerations."""
