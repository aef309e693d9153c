"""Many rollouts: options, sessions, groups, trainers."""
