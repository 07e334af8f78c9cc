"""Shapes of models: Hugging Face config.json to layers, parameters and FLOPs."""
