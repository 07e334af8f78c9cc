"""What people read of a whole run: its forecast, and plans for when nodes are lost."""
