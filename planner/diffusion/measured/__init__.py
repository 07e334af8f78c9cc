"""Predicted against measured: rows, the fit of the constants, the error with a model held out."""
