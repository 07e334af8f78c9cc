"""Probes of one device."""
