"""Layer by layer: how many each stage holds, which are recomputed, which stay gathered."""
