"""Sweeps: many questions that differ in a few fields, answered side by side and kept as a study."""
