"""Ways out of a slot without a network: what may be reached, the proxy that keeps to it, and what was asked for."""
