"""Time, power and memory of one batch, in closed form, for many degrees at once."""
