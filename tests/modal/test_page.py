"""The mission's Modal page, example by example: the same lines, in programs of their own that nobody tidies up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hermes_modal_emulator import ModalEmulator

pytestmark = pytest.mark.usefixtures("workable")


def run(program: str, tmp_path: Path, *, timeout_s: float = 120) -> str:
    """What a program says; it must end by itself, well, and without a word on standard error."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(file)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=tmp_path,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def nothing_runs(emulator: ModalEmulator, limit_s: float = 5) -> bool:
    deadline = time.monotonic() + limit_s
    while emulator.sandboxes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not emulator.sandboxes()


def test_configuration_and_batched_execution(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    """Nobody stops the backend: the sandboxes end with the program."""
    out = run(
        """
        import asyncio, time
        from hermes_modal import ModalSandboxConfig, ModalToolBackend

        config = ModalSandboxConfig(
            name="default",
            image="python:3.11",
            cpu=1.0,
            memory=2048,
            slots_per_sandbox=10,  # 10 trajectories per container
            min_sandboxes=1,
            max_sandboxes=5,
        )

        backend = ModalToolBackend(config.with_app_name("my-training"))

        async def main():
            # Acquire slots for multiple trajectories
            slots = [await backend.acquire(f"traj-{i}") for i in range(50)]
            await backend.execute_batch(
                [(slot, "write_file", {"path": "step.py", "content": "import time; time.sleep(1)"}) for slot in slots]
            )
            began = time.monotonic()

            # Execute batch across all slots in parallel
            results = await backend.execute_batch([
                (slot, "bash", {"command": "python3 step.py"})
                for slot in slots
            ])

            print(len({slot.sandbox_id for slot in slots}), len({slot.slot_id for slot in slots}))
            print([result.success for result in results].count(True), [r.error for r in results if not r.success])
            print(time.monotonic() - began)
            print(backend.get_status()["total_slots"])

            # Release slots
            for slot in slots:
                await backend.release(slot)

        asyncio.run(main())
        """,
        tmp_path,
    ).splitlines()
    assert out[:2] == ["5 50", "50 []"]
    assert out[3] == "50"
    assert nothing_runs(own_emulator)
    apps = [each["request"]["app_name"] for each in own_emulator.requests("AppGetOrCreate")]
    assert set(apps) == {"my-training-default"}


def test_profiles(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    out = run(
        """
        import asyncio
        from hermes_modal import ModalSandboxConfig, ModalToolBackend

        backend = ModalToolBackend.with_profiles(
            app_name="rl-training",
            profiles={
                "default": ModalSandboxConfig(
                    name="default",
                    cpu=1.0,
                    memory=2048,
                ),
                "pytorch-gpu": ModalSandboxConfig(
                    name="pytorch-gpu",
                    image="pytorch/pytorch:2.1.0-cuda12.1-cudnn8-runtime",
                    gpu="T4",
                    memory=16384,
                ),
            }
        )

        async def main():
            # CPU task
            slot1 = await backend.acquire("traj-1", profile="default")

            # GPU task
            slot2 = await backend.acquire("traj-2", profile="pytorch-gpu")

            results = await backend.execute_batch([(slot, "bash", {"command": "pwd"}) for slot in (slot1, slot2)])
            print(slot1.sandbox_id != slot2.sandbox_id, *(result.output.strip() for result in results))
            print(backend.get_status()["active_pools"], backend.list_profiles()["pytorch-gpu"]["gpu"])
            await backend.stop()

        asyncio.run(main())
        """,
        tmp_path,
    ).splitlines()
    assert out == ["True /data/slot_0 /data/slot_0", "['default', 'pytorch-gpu'] T4"]
    assert nothing_runs(own_emulator)
    [asked] = own_emulator.requests("SandboxCreate")
    assert asked["request"]["definition"]["resources"]["gpu_config"]["gpu_type"] == "T4"
    assert len(own_emulator.requests("SandboxCreateV2")) == 1


def test_credentials(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    own_emulator.add_secret("my-api-key", {"API_KEY": "sk-xxx"})
    out = run(
        """
        import asyncio
        from hermes_modal import ModalSandboxConfig, ModalToolBackend

        # Reference in config
        config = ModalSandboxConfig(
            secrets=["my-api-key"], # Modal secret names
            env_vars={"DEBUG": "1"}, # Additional env vars
        )

        async def main():
            async with ModalToolBackend(config) as backend:
                slot = await backend.acquire()
                print((await backend.execute(slot, "bash", {"command": "echo $DEBUG $API_KEY"})).output)

        asyncio.run(main())

        # Commands see what the profile names for them
        config = ModalSandboxConfig(secrets=["my-api-key"], slot_secrets=["API_KEY"], env_vars={"DEBUG": "1"})
        asyncio.run(main())
        """,
        tmp_path,
    )
    assert out.split() == ["1", "1", "sk-xxx"]
    assert nothing_runs(own_emulator)


def test_a_stop_that_nobody_awaits(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    """No warning, nothing left running; and what is awaited is over then."""
    out = run(
        """
        import asyncio
        from hermes_modal import ModalSandboxConfig, ModalToolBackend

        backend = ModalToolBackend(ModalSandboxConfig(app_name="stopped"))

        async def main():
            await backend.acquire()
            backend.stop()

        asyncio.run(main())
        asyncio.run(backend.stop())
        print("over")
        """,
        tmp_path,
    )
    assert out == "over\n"
    assert nothing_runs(own_emulator, 1)


@pytest.mark.few(0, 2)
@pytest.mark.parametrize("how", ["exception", "terminate", "exit", "interrupt"])
def test_ends_clean_however_the_program_ends(own_emulator: ModalEmulator, tmp_path: Path, how: str) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        from hermes_modal import ModalSandboxConfig, ModalToolBackend

        backend = ModalToolBackend(ModalSandboxConfig(max_sandboxes=2))

        async def main():
            slot = await backend.acquire("t")
            how = {how!r}
            if how == "exception":
                raise LookupError("of the user's")
            if how == "exit":
                sys.exit(3)
            loop = asyncio.get_running_loop()
            number = signal.SIGINT if how == "interrupt" else signal.SIGTERM
            if how == "terminate":
                loop.add_signal_handler(number, asyncio.current_task().cancel)
            os.kill(os.getpid(), number)
            await backend.execute(slot, "bash", {{"command": "sleep 60"}}, timeout_s=90)

        asyncio.run(main())
        """
    )
    file = tmp_path / "program.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    words = done.stderr.strip().splitlines()
    last = {"exception": "LookupError", "exit": "", "interrupt": "KeyboardInterrupt", "terminate": "CancelledError"}[
        how
    ]
    assert (last in words[-1]) if last else not words
    assert "cannot schedule" not in done.stderr and "never awaited" not in done.stderr
    assert nothing_runs(own_emulator, 1), done.stderr


def test_after_kill_9_the_sandboxes_end_themselves(own_emulator: ModalEmulator, tmp_path: Path) -> None:
    program = """
    import asyncio, os, signal
    from hermes_modal import ModalSandboxConfig, ModalToolBackend

    async def main():
        backend = ModalToolBackend(ModalSandboxConfig(max_sandboxes=2, orphan_ttl_s=2))
        await backend.acquire("t")
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=False)
    assert done.returncode == -9
    assert len(own_emulator.sandboxes()) == 1
    assert nothing_runs(own_emulator, 20)
