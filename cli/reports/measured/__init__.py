"""What people read of measured runs: predictions against them, constants fitted to them, what own points bring."""
