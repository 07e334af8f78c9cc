"""Machines and their links, as a spec describes them or as they were measured."""
