"""The driver: the only place where rollout, training and inference meet."""
