"""Agents, which work on a prompt with tool calls: the model loop and the baselines `oracle` and `nop`."""
