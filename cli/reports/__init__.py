"""How plans, comparisons and validations look in a terminal."""
