"""Runs pytest in a slot, and reads what it says of each test."""
