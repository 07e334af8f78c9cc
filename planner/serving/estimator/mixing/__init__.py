"""What mixes the tokens of a sequence: softmax attention over the cache, recurrent mixers, indexers."""
