"""Our errors for those of E2B's SDK, which raises many kinds, and plain exceptions for answers that it can't read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxNotRunningException,
    ServiceBusyException,
    TemplateException,
)

from hermes_core import ChannelLost, HermesError, ImageError, ProvisionError, SandboxLost

KEY_HINT = "E2B_API_KEY must hold a valid key of the account: https://e2b.dev/dashboard?tab=keys"
TEMPLATE_HINT = "name a template of your account, as `e2b template list` shows them: `--backend.image=NAME`"
_LIMIT_HINT = "the account's limit of requests or of sandboxes is reached: lower max_sandboxes, or end other sandboxes"
_OUTAGE_HINT = "see https://status.e2b.dev; `hermes-rl doctor e2b` says whether E2B answers"
_REFUSED = range(400, 500)


@contextmanager
def creation_errors(profile: str, template: str | None) -> Iterator[None]:
    """Raise our errors for those of the block, which creates a sandbox."""
    try:
        yield
    except HermesError:
        raise
    except Exception as error:
        raise _not_created(error, profile, template) from error


@contextmanager
def sandbox_errors(sandbox_id: str) -> Iterator[None]:
    """Raise our errors for those of the block, which asks for something about a sandbox."""
    try:
        yield
    except HermesError:
        raise
    except (NotFoundException, SandboxNotRunningException) as error:
        raise SandboxLost(f"the sandbox has ended: {error}", sandbox_id=sandbox_id) from error
    except Exception as error:
        hint = KEY_HINT if isinstance(error, AuthenticationException) else _OUTAGE_HINT
        raise ChannelLost(f"E2B could not be reached: {say(error)}", hint=hint, sandbox_id=sandbox_id) from error


def say(error: Exception) -> str:
    """Return an error's text, bounded, with the name of its class if the text says little."""
    text = str(error)[:500]
    return text if isinstance(error, SandboxException) and text else f"{type(error).__name__}: {text}"


def _not_created(error: Exception, profile: str, template: str | None) -> HermesError:
    message = f"profile {profile!r}: creating a sandbox failed: {say(error)}"
    status = error.status_code if isinstance(error, SandboxException) else None
    if isinstance(error, AuthenticationException) or status in (401, 403):
        return ProvisionError(message, hint=KEY_HINT, retryable=False)
    if isinstance(error, RateLimitException):
        return ProvisionError(message, hint=_LIMIT_HINT)
    if isinstance(error, ServiceBusyException):
        return ProvisionError(message, hint=_OUTAGE_HINT)
    if status == 404 or isinstance(error, NotFoundException | TemplateException):
        return ImageError(f"profile {profile!r}: template {template!r}: {say(error)}", hint=TEMPLATE_HINT)
    if isinstance(error, InvalidArgumentException) or status in _REFUSED:
        return ProvisionError(message, hint="change what the profile asks for", retryable=False)
    return ProvisionError(message, hint=_OUTAGE_HINT)
