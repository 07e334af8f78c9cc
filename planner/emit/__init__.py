"""A plan as launcher files; knows no catalog."""
