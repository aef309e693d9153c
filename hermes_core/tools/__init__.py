"""Tools that a model can call, their registry, toolsets and distributions."""
