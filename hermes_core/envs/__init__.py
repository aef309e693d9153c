"""Environments: items, prompts, hooks; one rollout, many rollouts, and the trajectory record."""
