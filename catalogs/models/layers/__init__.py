"""Layers of a model: which blocks each holds, and what estimators need to know of recurrent ones."""
