"""A plan for what is left of a cluster: who moves which bytes, and whether to wait."""
