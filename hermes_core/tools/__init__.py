"""What the model can call: tools, their registry, toolsets and distributions."""
