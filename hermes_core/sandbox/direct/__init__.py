"""Sandboxes without Python."""
