"""What lies beside the devices: launches, the host of unlike caches, API servers."""
