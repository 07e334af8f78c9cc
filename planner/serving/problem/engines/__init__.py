"""What each serving engine accepts, and what any of them would refuse."""
