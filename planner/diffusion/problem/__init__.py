"""The question: spec, what is made, degrees and the rules that they obey."""
