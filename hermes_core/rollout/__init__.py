"""One rollout, from the lease of its slot to the release, and the objects for its hooks."""
