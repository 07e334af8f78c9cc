"""Megatron-LM: arguments, model flags, scripts."""
