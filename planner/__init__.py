"""Questions about training and serving: problem, estimate, search, plan, launcher files."""
