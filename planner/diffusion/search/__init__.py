"""Which degrees, batch and replicas are best: every legal one is priced."""
