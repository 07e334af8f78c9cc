"""What every kind of question shares: plan, solution, spec reading, documents."""
