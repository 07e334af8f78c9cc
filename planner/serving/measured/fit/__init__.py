"""The model behind the serving constants (parts), the runs as rows of its fit (rows), and the solution (solution)."""
