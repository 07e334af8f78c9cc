"""The best placement found, and a bound."""
