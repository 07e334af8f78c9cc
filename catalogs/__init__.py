"""What is known about hardware, models and prices: every number with its source."""
