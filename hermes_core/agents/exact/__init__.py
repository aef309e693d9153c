"""Token-exact rollouts: what the model sees and samples, token for token."""
