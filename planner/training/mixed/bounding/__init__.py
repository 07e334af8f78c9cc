"""Training on several types of devices at once."""
