"""Arguments and scripts of the serving engines."""
