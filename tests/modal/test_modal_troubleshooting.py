"""The troubleshooting section of the mission's page, case by case, and what `hermes-rl doctor modal` advises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hermes_modal import ModalSandboxConfig, ModalToolBackend
from hermes_modal_emulator import ModalEmulator

from hermes_core.errors import AcquireTimeout, ProvisionError
from hermes_core.settings import Settings

DOCTOR = "from hermes_core.cli.main import main; main(['doctor', 'modal'])"
WITHOUT_MODAL = "import sys; sys.modules['modal'] = None\n"


def python(program: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "modal", **variables}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )


# --- "Modal package not installed" ------------------------------------------------------------------------------------


def test_the_package_is_not_installed(tmp_path: Path) -> None:
    program = f"""{WITHOUT_MODAL}
import asyncio
from hermes_modal import ModalSandboxConfig, ModalToolBackend

async def main():
    await ModalToolBackend(ModalSandboxConfig()).acquire()

asyncio.run(main())
"""
    done = python(program, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "the Modal package is not installed" in last
    assert "`pip install modal`, then `modal token new`" in last


def test_doctor_without_the_package(tmp_path: Path) -> None:
    done = python(WITHOUT_MODAL + DOCTOR, tmp_path)
    assert done.returncode == 1
    assert "modal: NOT usable: the Modal package is not installed" in done.stdout
    assert "-> `pip install modal`, then `modal token new`" in done.stdout


# --- authentication ---------------------------------------------------------------------------------------------------


def test_doctor_without_a_token(emulator: ModalEmulator, tmp_path: Path) -> None:
    done = python(DOCTOR, tmp_path, MODAL_TOKEN_ID="", MODAL_TOKEN_SECRET="")
    assert done.returncode == 1
    assert "modal: NOT usable: there is no Modal token" in done.stdout
    assert "-> `modal token new` makes a token; MODAL_TOKEN_ID and MODAL_TOKEN_SECRET name one" in done.stdout


def test_doctor_with_a_wrong_token(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    own_emulator.set(refused_tokens=["ak-emulator"])
    done = python(DOCTOR, tmp_path)
    assert done.returncode == 1
    assert "modal: NOT usable: Modal does not take the token of MODAL_TOKEN_ID" in done.stdout
    assert "-> `modal token new` makes another" in done.stdout


def test_doctor_with_a_server_that_does_not_answer(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    own_emulator.close()
    done = python(DOCTOR, tmp_path)
    assert done.returncode == 1
    assert "modal: NOT usable: " in done.stdout


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(0, 1)
@pytest.mark.parametrize("place", ["settings", "atropos", "terminal"])
def test_doctor_with_a_profile_whose_secret_does_not_exist(
    own_emulator: ModalEmulator, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "modal_profiles.yaml"
    file.write_text("profiles:\n  training:\n    secrets: [my-api-key]\n")
    variables = {
        "settings": {"HERMES_PROFILES_FILE": str(file)},
        "atropos": {"ATROPOS_MODAL_PROFILES_FILE": str(file)},
        "terminal": {"TERMINAL_ENV": "modal"},
    }[place]
    done = python(DOCTOR, tmp_path, **variables)
    assert done.returncode == 1, done.stdout
    assert "profile 'training', key 'secrets': there is no Modal secret 'my-api-key'" in done.stdout
    assert "-> `modal secret create my-api-key KEY=VALUE`, or correct the name" in done.stdout
    if place != "settings":
        return
    own_emulator.add_secret("my-api-key", {"API_KEY": "sk-xxx"})
    done = python(DOCTOR, tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    assert "modal: usable: " in done.stdout and "profile 'training' is from " in done.stdout


def test_doctor_says_what_overrides_what(emulator: ModalEmulator, tmp_path: Path) -> None:
    (tmp_path / "modal_profiles.yaml").write_text("profiles:\n  default: {image: python:3.12}\n  gpu: {gpu: T4}\n")
    (tmp_path / ".env").write_text("TERMINAL_ENV=modal\nTERMINAL_MODAL_IMAGE=python:3.10\nTERMINAL_TIMEOUT=60\n")
    done = python(
        DOCTOR,
        tmp_path,
        HERMES_ENV_FILE=".env",
        TERMINAL_TIMEOUT="90",
        TERMINAL_MODAL_GPUS="T4",
        TERMINAL_MODAL_MAX="3",
    )
    assert done.returncode == 0, done.stdout
    lines = [line.strip() for line in done.stdout.partition("terminal tool:")[2].splitlines()]
    assert "backend: modal (TERMINAL_ENV in .env)" in lines
    assert "timeout_s: 90.0 (TERMINAL_TIMEOUT, before .env)" in lines
    assert "lifetime_s: 300.0 (default)" in lines
    [default] = [line for line in lines if line.startswith("profile default: ")]
    assert "image=python:3.12 (modal_profiles.yaml, before TERMINAL_MODAL_IMAGE in .env)" in default
    assert "app_name=hermes-sandbox (default)" in default and "max_sandboxes=3 (TERMINAL_MODAL_MAX)" in default
    [gpu] = [line for line in lines if line.startswith("profile gpu: ")]
    assert "image=python:3.10 (TERMINAL_MODAL_IMAGE in .env)" in gpu and "gpu=T4 (modal_profiles.yaml)" in gpu
    assert "TERMINAL_MODAL_GPUS is not read: did you mean 'TERMINAL_MODAL_GPU'?" in lines


# --- "Sandbox creation failed" ----------------------------------------------------------------------------------------


async def failed(tmp_path: Path, **config: object) -> str:
    settings = Settings(state_dir=tmp_path)
    backend = ModalToolBackend(ModalSandboxConfig(name="training", acquire_timeout_s=2, **config), settings=settings)  # type: ignore[arg-type]
    try:
        with pytest.raises((ProvisionError, AcquireTimeout)) as caught:
            await backend.acquire()
        return str(caught.value)
    finally:
        await backend.stop()


async def test_creation_fails_for_the_quota(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    own_emulator.set(max_sandboxes=0)
    said = await failed(tmp_path)
    assert "profile 'training': creating a sandbox failed" in said
    assert "check the Modal dashboard for quota limits; lower max_sandboxes, or end other sandboxes" in said


async def test_creation_fails_for_the_image(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    own_emulator.set(missing_images=["nobody/nothing"])
    said = await failed(tmp_path, image="nobody/nothing:1")
    assert "verify that the image exists and is accessible; a private registry needs registry_secret" in said


async def test_creation_fails_for_the_name_of_a_secret(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    said = await failed(tmp_path, secrets=["my-api-kye"])
    assert "profile 'training', key 'secrets': there is no Modal secret 'my-api-kye'" in said
    assert "`modal secret create my-api-kye KEY=VALUE`, or correct the name" in said
