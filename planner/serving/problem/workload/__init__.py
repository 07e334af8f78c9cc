"""What a spec says of requests beyond nominal lengths and a rate, and what it becomes."""
