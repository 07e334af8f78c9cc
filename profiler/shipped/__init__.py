"""Fits the tables that ship in catalogs/seed."""
