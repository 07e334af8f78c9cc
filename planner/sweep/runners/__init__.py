"""Where the points of a sweep are answered: processes of this machine, or tasks of a Ray cluster."""
