"""Nodes that come and go: which of them a run uses when, and what that loses against hindsight."""
