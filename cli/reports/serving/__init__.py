"""A serving plan as a person reads it: the deployment, how sure its numbers are, what it answers beyond itself."""
