"""A command or configuration that is in use, read as a spec."""
