"""Encoders in front of what generates: of images, and of sound."""
