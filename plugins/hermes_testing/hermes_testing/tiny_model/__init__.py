"""A real language model, tiny and on the CPU, behind the wire formats of token-exact servers.

`folder` generates its tokenizer and weights, and `server` serves it. It needs torch, transformers and aiohttp
(`make setup EXTRAS="atropos torch"`), which are only imported when they are used.
"""
