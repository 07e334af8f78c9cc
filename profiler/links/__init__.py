"""Probes of the links between devices and nodes."""
