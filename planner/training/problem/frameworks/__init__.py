"""What each training framework accepts, and what any of them would refuse."""
