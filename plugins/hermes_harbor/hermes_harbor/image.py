"""Starts a slot as a container of the image would start: runs ENTRYPOINT, and waits for HEALTHCHECK."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from typing import Any

from hermes_core import SetupFailed, SlotHandle
from hermes_harbor.container import PREPARE_TIMEOUT_S, as_user, directory
from hermes_harbor.healthcheck import wait_until_healthy
from hermes_harbor.task_toml import Healthcheck

_STAYS = 'echo >"$0"; while :; do sleep 1000; done'

# Arguments: a path that does not exist, and the words of ENTRYPOINT. ENTRYPOINT gets a command that makes the path, so
# that we see when ENTRYPOINT is ready. An ENTRYPOINT that is a service never runs this command, so the number of checks
# is limited.
_START = f"""
ready=$1 round=0
shift
{{ "$@" sh -c {shlex.quote(_STAYS)} "$ready" </dev/null >"$ready.log" 2>&1; echo "$?" >"$ready.ended"; }} &
while [ "$round" -lt 100 ]; do
  round=$((round + 1))
  [ ! -e "$ready" ] || exit 0
  if [ -e "$ready.ended" ]; then cat "$ready.log"; exit 1; fi
  sleep 0.1 2>/dev/null || sleep 1
done
"""


async def start_image(leased: SlotHandle, workdir: str | None) -> bool:
    """Start the image's ENTRYPOINT as the image's user, and wait until HEALTHCHECK succeeds. Return False if the image
    has neither of the two.

    Raises:
        SetupFailed: ENTRYPOINT ended before its command, or the check fails.
    """
    image = leased.slot.image
    if image is None or not (image.entrypoint or image.healthcheck):
        return False
    commands = as_user(leased, None)
    if image.entrypoint:
        argv = ["/bin/sh", "-c", _START, "sh", f"/tmp/.started-{secrets.token_hex(8)}", *image.entrypoint]
        cwd = directory(leased, workdir)
        result = await commands.run(argv, cwd=cwd, timeout_s=PREPARE_TIMEOUT_S, merge_stderr=True)
        if not result.ok:
            raise SetupFailed(
                f"the image's ENTRYPOINT ended at once: {result.text.strip()[-500:]}",
                hint='it must run its arguments, as Harbor expects: `exec "$@"`',
            )
    if (check := _healthcheck(image.healthcheck)) is not None:
        await wait_until_healthy(commands, check, "the image's HEALTHCHECK")
    return True


def _healthcheck(config: Mapping[str, Any] | None) -> Healthcheck | None:
    """Return the check in an image's HEALTHCHECK, whose times are in nanoseconds; None if there is no check."""
    kind, *words = (config or {}).get("Test") or ["NONE"]
    if config is None or kind not in ("CMD", "CMD-SHELL"):
        return None
    return Healthcheck(
        command=words[0] if kind == "CMD-SHELL" else shlex.join(words),
        interval_sec=(config.get("Interval") or 30e9) / 1e9,
        timeout_sec=(config.get("Timeout") or 30e9) / 1e9,
        start_period_sec=(config.get("StartPeriod") or 0) / 1e9,
        start_interval_sec=(config.get("StartInterval") or 5e9) / 1e9,
        retries=config.get("Retries") or 3,
    )
