"""A real language model, tiny and on the CPU, behind the wire formats of token-exact servers.

`folder` generates the tokenizer and the weights, and `server` serves the model. Both need torch, transformers and
aiohttp (`make setup EXTRAS="atropos torch"`), which are only imported when they are used.
"""
