"""Metrics, the run folder and the rollout log: what a run leaves for people and tools to read."""
