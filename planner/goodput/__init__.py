"""What failures, checkpoints, repairs and spares make of a training run."""
