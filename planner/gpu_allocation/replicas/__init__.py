"""Whole replicas of given capacity: branch and bound with a proof."""
