"""A training plan as a person reads it: the choice, what it will take, the candidates that lost."""
