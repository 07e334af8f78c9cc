"""Training over sites that a slow network joins: local updates and compressed gradients beside synchronous training."""
