"""How specs, plan files and instances are read: models, quantities with units, limits, every problem at once."""
