"""One rollout, from lease to release, and what its hooks work with."""
