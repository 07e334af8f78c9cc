"""See README.md in this folder (or its parent)."""
