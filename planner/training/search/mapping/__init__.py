"""The mapping of ranks to nodes, searched together with the degrees where links differ."""
