"""Uneven links between nodes, and what groups of ranks and pipelines get of them."""
