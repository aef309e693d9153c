"""Finds, registers and calls plugins."""
