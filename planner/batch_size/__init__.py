"""Which global batch trains soonest: throughput against statistical efficiency."""
