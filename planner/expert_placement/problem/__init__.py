"""The question: loads, devices, objectives, recordings."""
