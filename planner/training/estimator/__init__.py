"""Time and memory of one optimizer step, in closed form over arrays of candidates."""
