"""Sweeps over specs on the command line: the command, and what people read of a study."""
