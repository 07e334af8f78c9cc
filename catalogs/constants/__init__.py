"""Fitted constants of the estimators, and the recipes of frameworks, engines and published benchmarks."""
