"""Apptainer's program on this host: where it is, its variables, and its command lines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hermes_core import ProvisionError
from hermes_core.sandbox.local.container import MAIN, OVERLAY
from hermes_singularity.config import SingularityConfig

INSTALL = "install Apptainer, for which no root is needed: https://apptainer.org/docs/admin/main/installation.html"

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FOR_DOWNLOADS = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_NOT_PASSED = ("ENV_", "BIND", "BINDPATH", "MOUNT", "TMPDIR", "CACHEDIR", "CONFIGDIR")


def find_program() -> str:
    """Return the path of `apptainer`, or of `singularity` if there is none.

    Raises:
        ProvisionError: it is not installed.
    """
    for name in ("apptainer", "singularity"):
        if path := shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}"):
            return str(Path(path).absolute())
    raise ProvisionError("neither apptainer nor singularity is in PATH", hint=INSTALL, retryable=False)


def exec_command(
    program: str, config: SingularityConfig, image: Path, place: Path, main: Sequence[str]
) -> tuple[str, ...]:
    """Return the command that runs a container.

    Args:
        place: the directory with what the container writes: its `data`, `tmp`, `vartmp`, and its changes of the image.
        main: the container's main process.
    """
    # Only what is named here is mounted. Its namespaces are ours (see container.py), but for that of its processes.
    binds = [f"{place}/{name}:{path}" for name, path in (("data", "/data"), ("tmp", "/tmp"), ("vartmp", "/var/tmp"))]
    flags = ["--contain", "--cleanenv", "--no-home", "--no-eval", "--no-mount", "sys,home,tmp,cwd,bind-paths"]
    flags += ["--pid", "--no-init", "--overlay", f"{place}/{OVERLAY}", "--pwd", "/data"]
    for bind in (*binds, *config.volumes):
        flags += ["--bind", bind]
    flags += ["--nv"] if config.gpus else []
    return program, "--quiet", "exec", *flags, *config.arguments, str(image), "/bin/sh", "-c", MAIN, "sh", *main


def variables(scratch: Path) -> dict[str, str]:
    """Return the variables that Apptainer runs a container with. None of the driver's is among them.

    Args:
        scratch: a directory for its own files, of which it needs none afterwards.
    """
    own = {"TMPDIR": str(scratch), "CACHEDIR": str(scratch), "CONFIGDIR": f"{scratch}/.apptainer"}
    both = {f"{prefix}_{name}": value for name, value in own.items() for prefix in ("APPTAINER", "SINGULARITY")}
    return {"PATH": _PATH, "HOME": str(scratch), "LANG": "C.UTF-8", **both}


def variables_for_downloads(scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Apptainer makes an image with: also the driver's proxies, certificates, and Apptainer's
    own, such as APPTAINER_DOCKER_USERNAME."""
    passed = {}
    for name, value in environ.items():
        prefix, _, rest = name.partition("_")
        is_its = prefix in ("APPTAINER", "SINGULARITY") and not rest.startswith(_NOT_PASSED)
        if is_its or name.upper() in _FOR_DOWNLOADS:
            passed[name] = value
    return {**passed, **variables(scratch)}
