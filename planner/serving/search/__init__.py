"""Deployments: candidates, bounds, the best one."""
