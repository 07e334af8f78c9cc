"""Time and memory of one serving iteration, in closed form."""
