"""A backend in under 100 lines: sandboxes with mounts and processes of their own, by `unshare`, for root."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

from hermes_core import AsyncioStreamChannel, ProvisionError, SandboxLost, hookimpl
from hermes_core.sandbox import contract
from hermes_core.sandbox.uids import reserve

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ROOT = """mount -t tmpfs -o mode=755 s /mnt; cd /mnt; mkdir -p data proc dev/pts var; mkdir -m 1777 tmp var/tmp dev/shm
mount -t proc proc proc; mount -t devpts -o ptmxmode=666 pts dev/pts; for n in $(cd /; ls -d bin etc lib* sbin usr); do
  if [ -L /$n ]; then cp -P /$n .; else mkdir $n; mount --bind /$n $n; mount -o remount,bind,ro $n; fi; done
for n in null zero random urandom; do : >dev/$n; mount --bind /dev/$n dev/$n; done; ln -s pts/ptmx dev/ptmx
for n in shmmni msgmni sem; do echo 0 0 0 0 >proc/sys/kernel/$n; done  # none is ready before its root is its own:
exec chroot . sh -c 'echo ready; exec "$@" >/dev/null' sh "$@" """
START = ["setsid", "--fork", "unshare", "--fork", "--kill-child", "--pid", "--ipc", "--mount", "sh", "-ec", ROOT, "sh"]


def sandboxes():
    """Of each: what `list` says, its first process, and how to hold it. The supervisor's environment is the label."""
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):  # it has ended, or is no supervisor of ours
            words = (proc / "environ").read_text().split("\0") * ((proc / "comm").read_text().strip() in START[:3])
            label = json.loads(next(word[15:] for word in words if word.startswith("HERMES_UNSHARE=")))
            children = (proc / "task" / proc.name / "children").read_text().split() or [proc.name]
            info = contract.SandboxInfo(label[0], *label[3:], proc.stat().st_ctime, contract.SandboxStatus.RUNNING)
            found[label[0]] = info, int(children[0]), label[:3]
    return found


class UnshareSandbox(contract.Sandbox):
    def __init__(self, sandbox_id, uid_base=None, environment=None):
        self.id, self.uid_base, self.environment = sandbox_id, uid_base, environment

    async def open(self, argv, *, env=None):
        if self.id not in (found := await asyncio.to_thread(sandboxes)):
            raise SandboxLost("the sandbox has ended", hint="create another one", sandbox_id=self.id)
        variables = [f"{name}={value}" for name, value in {"PATH": PATH, **self.environment, **(env or {})}.items()]
        enter = f"nsenter --target={found[self.id][1]} --mount --pid --ipc --root --wd env -i".split()
        return await AsyncioStreamChannel.spawn([*enter, *variables, *argv], env={"PATH": PATH})

    async def status(self):
        return contract.SandboxStatus("running" if self.id in await asyncio.to_thread(sandboxes) else "gone")

    async def terminate(self):
        while self.id in (found := await asyncio.to_thread(sandboxes)):
            with contextlib.suppress(ProcessLookupError):  # the kernel ends all others with the first process
                os.kill(found[self.id][1], 9)
            await asyncio.sleep(0.02)


class UnshareConfig(contract.SandboxConfig):
    unsupported = ("image", "cpu", "memory")


class UnshareBackend(contract.Backend):
    name, config_class = "unshare", UnshareConfig
    capabilities = contract.Capabilities(frozenset({contract.Isolation.USER, contract.Isolation.NAMESPACE}))

    def __init__(self, settings):
        self._creating = asyncio.Lock()

    async def create(self, spec):
        sandbox_id, environment = f"unshare-{spec.creation_id}", dict(spec.environment)
        async with self._creating:
            if sandbox_id in (found := await asyncio.to_thread(sandboxes)):
                return UnshareSandbox(*found[sandbox_id][2])
            main = spec.command(UnshareSandbox.state_dir)
            try:
                with reserve() as block:  # afterwards, only the sandbox's processes hold its user ids
                    label = sandbox_id, block.uid_base, environment, spec.owner, spec.creation_id
                    env = {"PATH": PATH, "HERMES_UNSHARE": json.dumps(label)}
                    supervisor = await AsyncioStreamChannel.spawn([*START, *main], env=env, pass_fds=block.descriptors)
                async with contextlib.aclosing(supervisor):
                    if await supervisor.read(100) != b"ready\n":
                        raise ProvisionError(f"unshare failed: {supervisor.stderr_tail}", hint="run the driver as root")
            except BaseException:
                await self.terminate_id(sandbox_id)
                raise
            return UnshareSandbox(*label[:3])

    async def list(self, owner=None):
        return [info for info, *_ in (await asyncio.to_thread(sandboxes)).values() if owner in (None, info.owner)]

    async def terminate_id(self, sandbox_id):
        await UnshareSandbox(sandbox_id).terminate()

    async def check(self):
        return contract.Diagnosis(os.geteuid() == 0, "namespaces by unshare, which takes root")


@hookimpl
def hermes_register_backends(registry):
    registry.add("unshare", UnshareBackend, summary="Namespaces of this host, by unshare: an example.")
