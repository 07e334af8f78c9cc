"""What follows from a placement: dispatch traffic, fronts, advice."""
