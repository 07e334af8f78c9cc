"""One reader a framework or engine."""
