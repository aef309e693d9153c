"""Token-exact rollouts, which record every token that the model sees and samples."""
