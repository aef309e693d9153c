"""For authors of plugins: scripted model servers and (later) the backend conformance kit."""
