"""Slots as leases: a pool and what it is made of."""
