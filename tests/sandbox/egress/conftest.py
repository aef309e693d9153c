"""A certificate for servers of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate of its own for allowed.test, denied.test and 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    names = "subjectAltName=DNS:allowed.test,DNS:denied.test,IP:127.0.0.1"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=test -keyout key -out cert -addext"
    subprocess.run([*command.split(), names], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "key").read_text() + (folder / "cert").read_text())
    return folder / "both.pem"
