"""The emulator's node: pods as real namespaces, and programs in them with the capabilities that the pod names."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hermes_modal_emulator.machines import MachineError, NamespaceMachine

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GO = "/.hermes-emulator-go"
OWN_NETWORK = """
ip link add eth0 type veth peer name node0
ip link set node0 up; ip link set eth0 up
ip addr add 10.244.0.2/24 dev eth0; ip route add default via 10.244.0.1
"""
"""Gives the pod's network namespace an interface, which leads to nobody. A pod of a cluster reaches others there."""

HOST_NETWORK = "HERMES_EMULATOR_HOST_NETWORK" in os.environ
"""Whether pods have this host's network, for tasks that install packages. No program in them then has NET_ADMIN."""

DEFAULT_CAPABILITIES = (
    *("audit_write", "chown", "dac_override", "fowner", "fsetid", "kill", "mknod", "net_bind_service", "setfcap"),
    *("setgid", "setpcap", "setuid", "sys_chroot"),
)


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def expand(text: str) -> str:
    """Return what Kubernetes makes of a word of a command where no variable is defined: `$$` is `$`."""
    return text.replace("$$", "$")


class PodMachine(NamespaceMachine):
    """The namespaces of a pod. Its first process waits for the setup containers, and becomes the pod's main process."""

    def __init__(self, base: Path, main: Sequence[str], memory_volumes: Sequence[str]) -> None:
        super().__init__(base, snapshot=None, volumes={}, network=HOST_NETWORK, workdir="/data")
        self._main, self._memory_volumes = main, memory_volumes

    def _script(self) -> str:
        lines = super()._script().splitlines()[:-2]
        root = shlex.quote(f"{self._base}/root")
        mounts = [
            f"mkdir -p {root}{path}; mount -t tmpfs -o mode=0777 tmpfs {root}{path}" for path in self._memory_volumes
        ]
        if not HOST_NETWORK:
            mounts += [OWN_NETWORK, f"mount -t sysfs sysfs {root}/sys"]
        # An image has an empty /tmp in its root directory. Here, this host's would be below the mount, for what makes
        # a root directory from it.
        lines[lines.index(f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp")] = f"mkdir -m 1777 {root}/tmp"
        overlay = next(at for at, line in enumerate(lines) if line.startswith("mount -t overlay"))
        lines.insert(overlay, f"mknod {shlex.quote(str(self._base))}/upper/tmp c 0 0")
        at = lines.index(f"cd {self._base}/root" if f"cd {self._base}/root" in lines else f"cd {root}")
        wait = f"exec >/dev/null 2>&1; while [ ! -e {GO} ]; do sleep 0.02; done; rm {GO}"
        read_only = "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys"
        return "\n".join([*lines[:at], *mounts, *lines[at:], wait, read_only, f"exec {shlex.join(self._main)}"])

    def go(self) -> None:
        """Start the main process."""
        (Path(f"/proc/{self._init}/root") / GO[1:]).touch()

    def signal(self, number: int) -> None:
        """Send a signal to the main process."""
        if self._init:  # 0 would be our own process group
            with suppress(ProcessLookupError):
                os.kill(self._init, number)

    async def wait(self) -> int:
        """Return the exit status of the main process, as a container runtime counts it."""
        assert self._holder is not None
        status = await self._holder.wait()
        return 128 - status if status < 0 else status


class Pod:
    """A pod that runs here: the object that the API shows, and its processes."""

    def __init__(self, body: dict[str, Any], folder: Path, changed: Callable[[], None]) -> None:
        self.body, self._changed = body, changed
        self._folder = Path(tempfile.mkdtemp(dir=folder)) / "machine"
        self._work: set[asyncio.Task[Any]] = set()
        self.machine: PodMachine | None = None
        self.ended = asyncio.Event()
        body["status"] = {"phase": "Pending", "conditions": []}

    @property
    def main(self) -> dict[str, Any]:
        """Return the container whose name is `sandbox`, or the first."""
        containers: list[dict[str, Any]] = self.body["spec"]["containers"]
        return next((each for each in containers if each["name"] == "sandbox"), containers[0])

    def start(self) -> None:
        """Begin to start the pod."""
        self.spawn(self._run())

    def spawn(self, work: Any) -> None:
        """Start work that ends with the pod."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def set(self, phase: str, **more: Any) -> None:
        """Change the pod's status."""
        self.body["status"].update(phase=phase, **more)
        self._changed()

    def state(
        self, container: Mapping[str, Any], state: Mapping[str, Any], key: str = "containerStatuses"
    ) -> dict[str, Any]:
        """Return the status of the pod with one container in this state."""
        image = {
            "image": f"docker.io/library/{container['image']}",
            "imageID": f"docker.io/library/x@sha256:{'0' * 64}",
        }
        return {key: [{"name": container["name"], "state": state, "ready": "running" in state, **image}]}

    async def _run(self) -> None:
        spec = self.body["spec"]
        if reason := unschedulable(spec):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": reason}
            self.set("Pending", conditions=[condition])
            return
        spec["nodeName"] = "node-1"
        for container in (*spec.get("initContainers", ()), self.main):
            if waiting := missing_image(container["image"]):
                self.set("Pending", **self.state(container, {"waiting": waiting}))
                return
        main = self.main
        volumes = [mount["mountPath"] for mount in main.get("volumeMounts", ())]
        command = confine([*map(expand, main.get("command", ["sleep", "infinity"])), *main.get("args", ())], main)
        self.machine = PodMachine(self._folder, with_env(command, self.env(main)), volumes)
        try:
            await self.machine.start()
        except MachineError as error:
            self.ended.set()
            self.set("Failed", reason="NoNamespaces", message=str(error))
            return
        for container in spec.get("initContainers", ()):
            process = await self.run(container, list(map(expand, container["command"])), stderr=subprocess.PIPE)
            _, words = await process.communicate()
            ended = {"exitCode": process.returncode, "reason": "Error", "message": words.decode()[-2000:]}
            if process.returncode:
                self.set("Failed", **self.state(container, {"terminated": ended}, "initContainerStatuses"))
                await self.machine.stop()
                self.ended.set()
                return
        self.machine.go()
        began = now()
        self.set("Running", podIP="10.244.0.2", startTime=began, **self.state(main, {"running": {"startedAt": began}}))
        limit = spec.get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                status = await self.machine.wait()
        except TimeoutError:
            await self.end("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            return
        await self.machine.stop()
        ended = {"exitCode": status, "reason": "Completed" if status == 0 else "Error", "finishedAt": now()}
        if not self.ended.is_set():
            self.set("Succeeded" if status == 0 else "Failed", **self.state(main, {"terminated": ended}))
            self.ended.set()

    async def end(self, reason: str, message: str) -> None:
        """End the pod as a kubelet does that evicts it."""
        self.ended.set()
        self.set("Failed", reason=reason, message=message, **self.state(self.main, {"terminated": {"exitCode": 137}}))
        if self.machine is not None:
            await self.machine.stop()

    async def stop(self, grace_s: float) -> None:
        """End the pod's processes: TERM, and KILL after the grace period."""
        if self.machine is not None and not self.ended.is_set():
            self.machine.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended.wait()
        self.ended.set()
        for task in [*self._work]:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work)
        if self.machine is not None:
            await self.machine.stop()

    def env(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of a container's programs."""
        given = {each["name"]: expand(each["value"]) for each in container.get("env", ())}
        return {
            "PATH": PATH,
            "HOSTNAME": self.body["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            **given,
        }

    async def run(
        self, container: Mapping[str, Any], argv: Sequence[str], **streams: Any
    ) -> asyncio.subprocess.Process:
        """Start a program in the pod."""
        assert self.machine is not None
        command = self.machine.argv(with_env(confine(argv, container), self.env(container)), "/data")
        return await asyncio.create_subprocess_exec(*command, env={"PATH": PATH}, start_new_session=True, **streams)


def with_env(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command that runs with exactly these variables."""
    return ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *argv]


def capabilities_of(container: Mapping[str, Any]) -> tuple[bool, set[str]]:
    """Return whether a container is privileged, and otherwise its capabilities."""
    security = container.get("securityContext", {})
    given = security.get("capabilities", {})
    base = set() if "ALL" in given.get("drop", ()) else {each.upper() for each in DEFAULT_CAPABILITIES}
    return bool(security.get("privileged")), base | set(given.get("add", ()))


def confine(argv: Sequence[str], container: Mapping[str, Any]) -> list[str]:
    """Return the command that runs with the container's capabilities and user, and, for want of a cgroup, with its
    memory as the limit of each process."""
    security = container.get("securityContext", {})
    privileged, capabilities = capabilities_of(container)
    words = ["setpriv"]
    if HOST_NETWORK:
        capabilities.discard("NET_ADMIN")
    if not privileged:
        words.append("--bounding-set=-all" + "".join(f",+{each.lower()}" for each in sorted(capabilities)))
    elif HOST_NETWORK:
        words.append("--bounding-set=-net_admin")
    if security.get("allowPrivilegeEscalation") is False:
        words.append("--no-new-privs")
    if user := security.get("runAsUser"):
        words += [f"--reuid={user}", f"--regid={security.get('runAsGroup', 0)}", "--clear-groups"]
    if len(words) == 1:
        words = []
    memory = container.get("resources", {}).get("limits", {}).get("memory", "")
    if memory.endswith("Mi"):
        words = ["prlimit", f"--data={int(memory[:-2]) << 20}", *words]
    return [*words, *argv]


def unschedulable(spec: Mapping[str, Any]) -> str:
    """Return why no node takes the pod; empty if one does."""
    requests = spec["containers"][0].get("resources", {}).get("requests", {})
    if float(requests.get("cpu", 0)) > 64:
        return "0/1 nodes are available: 1 Insufficient cpu."
    if "nvidia.com/gpu" in requests:
        return "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    if spec.get("nodeSelector", {}).get("emulator", "yes") != "yes":
        return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    return ""


def missing_image(image: str) -> dict[str, str] | None:
    """Return why a container waits whose image can't be pulled; None if it can be."""
    prefix = f'failed to pull and unpack image "docker.io/library/{image}": '
    if "missing" in image:
        return {"reason": "ErrImagePull", "message": f"rpc error: code = NotFound desc = {prefix}not found"}
    if "flaky" in image:
        return {"reason": "ErrImagePull", "message": f"{prefix}dial tcp: i/o timeout"}
    if "silent" in image:
        return {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
    return None
