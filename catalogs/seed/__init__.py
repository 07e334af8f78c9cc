"""Data of the catalog; see catalogs/README.md."""
