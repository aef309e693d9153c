"""Rows from files and hubs, and the built-in environments that are made of them."""
