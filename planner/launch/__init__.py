"""From a stored plan to its launcher files: looks up what emit needs."""
