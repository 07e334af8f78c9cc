"""Reads what other tools measured; one module per format, each rejects what it does not understand."""
