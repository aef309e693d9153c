"""Inspect's portable checks of a provider: how many pass, and in how long, through ours and through Inspect's own.

    .venv-inspect/bin/python -m benchmarks.inspect_checks [provider …]

Each check has a sandbox of its own, which is made and ended in the time that is printed. Inspect's `docker` provider
takes Docker Compose. An `ssh` provider takes HERMES_TEST_SSH_CONFIG.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from hermes_inspect import HermesSandbox, HermesSandboxConfig
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

IMAGE = {"image": os.environ.get("HERMES_BENCH_IMAGE", "hermes-test-python:bookworm")}
SSH = {"host": "hermes-test", "config_file": os.environ.get("HERMES_TEST_SSH_CONFIG", "")}

PROVIDERS: dict[str, tuple[Any, Any]] = {
    "ours on local, user": (HermesSandbox, HermesSandboxConfig(isolation="user")),
    "Inspect's local": (LocalSandboxEnvironment, None),
    "ours on docker, user": (
        HermesSandbox,
        HermesSandboxConfig(backend="docker", isolation="user", backend_config=IMAGE),
    ),
    "ours on docker, root": (
        HermesSandbox,
        HermesSandboxConfig(backend="docker", isolation="dedicated", backend_config={**IMAGE, "slot_user": "root"}),
    ),
    "ours on ssh": (HermesSandbox, HermesSandboxConfig(backend="ssh", backend_config=SSH)),
    "Inspect's docker": (DockerSandboxEnvironment, None),
}

CHECKS = [(name, check) for name, check in vars(self_check).items() if name.startswith("test_")]


async def passes(provider: Any, config: Any, check: Any) -> bool:
    """Return whether a check passes in a sandbox of its own."""
    made = await provider.sample_init("task", config, {})
    try:
        await check(made["default"])
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        return False  # what a check raises is its finding; what pytest raises is no Exception
    else:
        return True
    finally:
        await provider.sample_cleanup("task", config, made, False)


async def run(name: str) -> None:
    """Print how many checks pass, which do not, and the seconds."""
    provider, config = PROVIDERS[name]
    try:
        await provider.task_init("startup", config)
    except Exception as error:
        print(f"{name:22} can't be measured here: {error}")
        return
    try:
        began, failed = time.monotonic(), []
        for title, check in CHECKS:
            if not await passes(provider, config, check):
                failed.append(title)
        seconds = time.monotonic() - began
    finally:
        await provider.task_cleanup("shutdown", config, True)
    print(f"{name:22} {len(CHECKS) - len(failed)} of {len(CHECKS)} in {seconds:.0f} s; not: {', '.join(failed) or '-'}")


def main() -> None:
    """Run the checks through the named providers, or all of them."""
    for name in sys.argv[1:] or PROVIDERS:
        asyncio.run(run(name))


if __name__ == "__main__":
    main()
