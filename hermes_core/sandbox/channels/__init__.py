"""Ready-made channels to programs in a sandbox."""
