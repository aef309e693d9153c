"""Runs pytest in a slot, and reads the outcome of each test."""
