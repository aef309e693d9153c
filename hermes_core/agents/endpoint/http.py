"""Options and limits for all HTTP clients of model servers."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

from hermes_core.agents.endpoint.errors import ResponseTooLarge


def is_loopback(url: str | None) -> bool:
    """Return whether the URL belongs to a server on this host."""
    return url is not None and re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)", url) is not None


def client_options(url: str | None) -> dict[str, Any]:
    """Return the options of an HTTP client for the endpoint at this URL. A server on this host is asked directly, even
    if the environment names a proxy."""
    trust_env = not is_loopback(url)
    certificates = (os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return {"trust_env": trust_env, "verify": _tls(trust_env, *certificates)}


@lru_cache(maxsize=8)
def _tls(trust_env: bool, *certificates: str | None) -> ssl.SSLContext:
    """Return the TLS settings of all clients. They are cached, because reading the certificates takes 20 ms, and some
    trainers' adapters make a client for each rollout.

    Args:
        certificates: the paths to certificates in the environment, as a part of the cache's key.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=trust_env)


async def read_bounded(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    """Return the chunks of an endpoint's answer, joined.

    Args:
        limit: maximum number of bytes.

    Raises:
        ResponseTooLarge: the answer is longer than the limit. The rest is not read.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise ResponseTooLarge(
                f"the endpoint's answer is longer than {limit} bytes",
                hint="check the base URL, set max_tokens, or raise max_response_bytes",
            )
    return bytes(body)
