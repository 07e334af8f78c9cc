"""Studies in the database: which questions they hold, and how far each one is."""
