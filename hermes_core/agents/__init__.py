"""What turns a prompt into tool calls until done: the model loop and the baselines `oracle` and `nop`."""
