"""Rank mapping: which pipeline stage and data-parallel rank each node takes, where links differ."""
