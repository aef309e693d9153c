"""Whether Modal can be used here, for `hermes-rl doctor`."""

from __future__ import annotations

import modal
from modal import exception
from modal.config import config as modal_config

from hermes_core.errors import ConfigError
from hermes_core.sandbox.contract import Diagnosis
from hermes_modal.account import Account


async def diagnose(account: Account) -> Diagnosis:
    """Connect. Never raises."""
    url = str(modal_config.get("server_url"))
    try:
        await account.client()
    except ConfigError as error:
        return Diagnosis(False, error.message, advice=(error.hint or "",))
    except exception.AuthError as error:
        advice = ("`modal token new` makes another; MODAL_TOKEN_ID and MODAL_TOKEN_SECRET come before ~/.modal.toml",)
        return Diagnosis(False, f"Modal does not take the token: {error}", advice=advice)
    except (exception.Error, TimeoutError, OSError) as error:
        said = str(error) or type(error).__name__
        advice = ("check the network, and https://status.modal.com; MODAL_SERVER_URL names another server",)
        return Diagnosis(False, f"Modal does not answer at {url}: {said}", advice=advice)
    kinds = "V2, and V1 for GPUs" if modal_config.get("sandbox_v2") is not False else "V1"
    return Diagnosis(
        True,
        f"Modal at {url}, SDK {modal.__version__}",
        (f"sandboxes of kind {kinds}", "levels: shared, user, dedicated"),
    )
