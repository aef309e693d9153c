"""How plugins are found, registered and called."""
