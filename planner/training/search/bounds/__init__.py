"""What no candidate of a template, and no rank mapping, can beat."""
