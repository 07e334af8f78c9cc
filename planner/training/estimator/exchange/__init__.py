"""What training ranks exchange: collectives over links, states of data-parallel ranks, split sequences."""
