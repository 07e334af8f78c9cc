"""Measures this machine and its links, and fits what others measured."""
