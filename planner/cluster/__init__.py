"""Machines and their links: what a spec says of them, measured or described."""
