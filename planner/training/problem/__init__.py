"""The question: spec, choices, frameworks and their rules."""
