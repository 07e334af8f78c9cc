"""How to generate text on machines at home: on one, in a pipeline, or with tensor parallelism over slow links."""
