"""The simulator's rules as machine code, for runs of many requests: the same answers, bit for bit."""
