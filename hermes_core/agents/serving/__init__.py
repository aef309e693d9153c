"""The model server for a program in a slot: three dialects in front of whatever answers the rollout's model calls."""
