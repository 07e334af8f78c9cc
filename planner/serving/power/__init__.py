"""What a deployed plan draws over time, and how many copies of it a power budget holds."""
