"""What workers and their devices send to each other: collectives, tokens of experts, KV caches."""
