"""The model server for a program in a slot. It speaks four dialects, and asks the rollout's model."""
