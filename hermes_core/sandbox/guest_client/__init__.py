"""The driver's end of a guest."""
