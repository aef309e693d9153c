"""Sandboxes: the backend contract, channels, the guest, slots, pools and the tool backend."""
