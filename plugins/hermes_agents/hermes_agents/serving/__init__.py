"""The model server for a program in a slot: four dialects in front of whatever answers the rollout's model calls."""
