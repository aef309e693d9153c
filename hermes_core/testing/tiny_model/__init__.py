"""A real language model, tiny and on the CPU, behind the wire formats of token-exact servers.

`folder` makes its tokenizer and weights on the spot, `server` serves it, and `exactness` proves that what a trainer is
given is what was sampled. It takes torch, transformers and aiohttp
(`make setup EXTRAS="atropos torch"`), which are not imported before they are used.
"""
