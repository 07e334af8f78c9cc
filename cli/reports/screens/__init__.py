"""The first screen of a plan, by kind: the answer in a sentence, what it takes as bars, what comes next."""
