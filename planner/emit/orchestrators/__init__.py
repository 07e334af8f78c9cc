"""Kubernetes, Slurm, Ray and SkyPilot around a framework's or an engine's job."""
