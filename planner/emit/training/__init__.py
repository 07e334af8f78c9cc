"""Arguments and scripts of the training frameworks."""
