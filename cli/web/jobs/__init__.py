"""Jobs of the service: a worker that answers them, and the workers of one machine."""
