"""What each model family takes for granted: the facts of its architecture that its ``config.json`` does not say.

A configuration states sizes; that Qwen2 biases its queries, or that every sixth layer of Gemma 3 has full attention,
is written in the modelling code. One :class:`~.facts.Family` holds those facts, one entry of a table a ``model_type``;
a family that spells its sizes in its own way names a function of :mod:`.dialects`.
"""
