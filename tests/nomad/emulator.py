"""A small Nomad: the calls that the backend makes, written from the API's documentation and source (2.0).

`python -m tests.nomad.emulator` serves on a free port and prints it. A sandbox is a `NamespaceMachine` with the
capabilities of its job. What the docker driver does badly is done badly here too: an exec whose process has ended loses
the output that was not yet sent, and its output comes in frames of a kilobyte. `/emulator/…` sets faults and settings.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from hermes_modal_emulator.machines import BASE_ENV, MachineError, NamespaceMachine

TASK = "sandbox"
FRAME_BYTES = 1024
ENDED = ("complete", "failed", "lost")
SETTINGS: dict[str, Any] = {
    "token": "",
    "missing_images": [":missing"],
    "unreachable_images": [],
    "capacity": 1000,
    "nodes": ["node-1", "node-2"],
    "drivers": ["docker", "podman"],
    "max_connections": 100,
    "page_size": 500,
    "place_delay_s": 0.0,
    "start_delay_s": 0.0,
    "leader": "127.0.0.1:4647",
}


class Sandbox:
    """An allocation and its machine."""

    def __init__(self, emulator: Emulator, job: dict[str, Any], node: str, evaluation_id: str) -> None:
        self.emulator, self.job = emulator, job
        group = job["TaskGroups"][0]
        self.task = group["Tasks"][0]
        self.machine: NamespaceMachine | None = None
        self.main: asyncio.subprocess.Process | None = None
        self.ending: asyncio.Task[None] | None = None
        now = time.time_ns()
        self.data: dict[str, Any] = {
            "ID": str(uuid.uuid4()),
            "EvalID": evaluation_id,
            "Name": f"{job['ID']}.{group['Name']}[0]",
            "Namespace": job["Namespace"],
            "NodeID": node,
            "NodeName": node,
            "JobID": job["ID"],
            "TaskGroup": group["Name"],
            "DesiredStatus": "run",
            "DesiredDescription": "",
            "ClientStatus": "pending",
            "ClientDescription": "No tasks have started",
            "TaskStates": {TASK: {"State": "pending", "Failed": False, "Events": []}},
            "CreateIndex": emulator.step(),
            "CreateTime": now,
        }

    def change(self, event: str = "", message: str = "", **values: Any) -> None:
        self.data.update(values)
        if event:
            state = self.data["TaskStates"][TASK]
            state["Events"].append({"Type": event, "DisplayMessage": message, "Time": time.time_ns()})
        self.data["ModifyIndex"] = self.emulator.step()

    async def run(self) -> None:
        """Pull, start and wait, as a node's client does."""
        try:
            await self._start()
        except (Refused, MachineError) as error:
            if self.ending is not None:  # it was stopped while it started
                return
            self.change("Driver Failure", str(error))
            self.change(
                "Not Restarting", "Policy allows no restarts", ClientStatus="failed", ClientDescription="Failed tasks"
            )
            return
        if self.ending is not None:  # it was stopped while it started
            assert self.machine is not None
            await self.machine.stop()
            return
        state = self.data["TaskStates"][TASK]
        state.update(State="running", StartedAt=time.strftime("%Y-%m-%dT%H:%M:%SZ"))
        self.change("Started", "Task started by client", ClientStatus="running", ClientDescription="Tasks are running")
        assert self.main is not None
        status = await self.main.wait()
        await self.end("complete" if status == 0 else "failed", f"Exit Code: {status}")

    async def _start(self) -> None:
        emulator, config = self.emulator, self.task["Config"]
        image = _literal(config["image"])
        self.change("Driver", f"Downloading image {image}")
        await asyncio.sleep(emulator.settings["start_delay_s"])
        if self.ending is not None:
            raise Refused("it was stopped")
        if any(part in image for part in emulator.settings["missing_images"]):
            raise Refused(f"Failed to pull `{image}`: Error response from daemon: manifest for {image} not found")
        if any(part in image for part in emulator.settings["unreachable_images"]):
            raise Refused(f"Failed to pull `{image}`: Error response from daemon: net/http: TLS handshake timeout")
        self.machine = NamespaceMachine(
            emulator.folder / self.data["ID"],
            snapshot=None,
            volumes={},
            network=config.get("network_mode") != "none",
            workdir=_workdir(config),
        )
        try:
            await self.machine.start()
        except OSError as error:  # it was stopped meanwhile
            raise Refused(f"no namespaces: {error}") from error
        for name, value in _limits(config).items():
            path = "/proc/sys/" + name.replace(".", "/")
            await (await self.spawn(["sh", "-c", f"echo {value} >{path}"], rights=False)).wait()
        argv = [_literal(word) for word in [*config["entrypoint"], *config["args"]]]
        self.main = await self.spawn(argv)

    async def spawn(self, argv: list[str], *, rights: bool = True) -> asyncio.subprocess.Process:
        """Start a process in the machine, with the rights of the job's driver settings."""
        assert self.machine is not None
        config = self.task["Config"]
        if rights:
            capabilities = ",".join(f"+{name.lower()}" for name in config["cap_add"])
            limit = self.task["Resources"].get("MemoryMB", 300) << 20
            held = ["setpriv", f"--bounding-set=-all,{capabilities}", "--inh-caps=-all", "--no-new-privs", "--"]
            argv = ["prlimit", f"--data={limit}", *held, *argv]
        return await asyncio.create_subprocess_exec(
            *self.machine.argv(argv, _workdir(config)),
            stdin=asyncio.subprocess.PIPE if rights else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if rights else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE if rights else asyncio.subprocess.DEVNULL,
            env={**BASE_ENV, "NOMAD_ALLOC_ID": self.data["ID"], **self.task["Env"]},
            start_new_session=True,
        )

    async def end(self, status: str, why: str = "") -> None:
        if self.ending is None:
            self.ending = asyncio.create_task(self._end(status, why))
        await asyncio.shield(self.ending)

    async def _end(self, status: str, why: str) -> None:
        if self.machine is not None:
            await self.machine.stop()
        if self.data["ClientStatus"] not in ENDED:
            self.data["TaskStates"][TASK].update(State="dead")
            self.change("Terminated", why, ClientStatus=status, ClientDescription="All tasks have completed")


class Refused(Exception):
    """The driver does not start the task."""


def _workdir(config: dict[str, Any]) -> str:
    return str(config.get("work_dir") or config["working_dir"])  # docker, podman


def _limits(config: dict[str, Any]) -> dict[str, str]:
    limits = config.get("sysctl") or {}
    return limits[0] if isinstance(limits, list) else limits  # docker's driver has a list of mappings


def _literal(text: str) -> str:
    """Return a text as HCL evaluates it; a template is an error, because none is meant."""
    plain = text.replace("$${", "\0").replace("%%{", "\1")
    if "${" in plain or "%{" in plain:
        raise Refused(f"failed to parse config: Invalid template in {text[:40]!r}")
    return plain.replace("\0", "${").replace("\1", "%{")


class Emulator:
    """The server's state: jobs, evaluations, allocations, and one index that counts all changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = json.loads(json.dumps(SETTINGS))
        self.index = 10
        self.changed = asyncio.Event()
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.sandboxes: dict[str, Sandbox] = {}
        self.faults: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.execs: set[web.WebSocketResponse] = set()

    def step(self) -> int:
        self.index += 1
        self.changed.set()
        self.changed = asyncio.Event()
        return self.index

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # --- the HTTP side

    @web.middleware
    async def serve(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        if request.path.startswith("/emulator"):
            return web.json_response(await handler(request))
        call = f"{request.method} {request.path}"
        self.counts["exec" if call.endswith("/exec") else f"{request.method} {request.path.split('/')[2]}"] += 1
        fault = next((each for each in self.faults if each["match"] in call and each["times"] > 0), None)
        if fault is not None:
            fault["times"] -= 1
            await asyncio.sleep(fault.get("delay_s", 0))
            if "status" in fault:
                headers = {"Retry-After": str(fault["retry_after"])} if "retry_after" in fault else {}
                return web.Response(status=fault["status"], text=fault.get("text", "busy"), headers=headers)
        if self.settings["leader"] == "":
            return web.Response(status=500, text="No cluster leader")
        if self.settings["token"] and request.headers.get("X-Nomad-Token") != self.settings["token"]:
            return web.Response(status=403, text="Permission denied")
        if "/exec" in request.path:
            return await self.exec(request, fault or {})
        value = await self._answer(request, handler)
        if fault is not None and fault.get("lose_answer"):
            assert request.transport is not None
            request.transport.abort()
        if isinstance(value, web.Response):
            return value
        value, headers = value if isinstance(value, tuple) else (value, {})
        return web.json_response(value, headers={"X-Nomad-Index": str(self.index_of(request)), **headers})

    def index_of(self, request: web.Request) -> int:
        """Return the index of what is asked for: one allocation has its own."""
        sandbox = self.sandboxes.get(request.match_info.get("id", ""))
        return self.index if sandbox is None else sandbox.data.get("ModifyIndex", self.index)

    async def _answer(self, request: web.Request, handler: Callable[..., Any]) -> Any:
        """Answer a blocking query when the index has passed the given one, or the wait is over."""
        if index := request.query.get("index"):
            wait_s = float(request.query.get("wait", "300000ms").removesuffix("ms")) / 1000
            deadline = time.monotonic() + wait_s
            while self.index_of(request) <= int(index) and (left := deadline - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(self.changed.wait(), left)
                except TimeoutError:
                    break
        return await handler(request)

    def _key(self, request: web.Request) -> tuple[str, str]:
        return request.query.get("namespace", "default"), request.match_info["id"]

    async def register(self, request: web.Request) -> Any:
        body = await request.json()
        job = body["Job"]
        key = job.setdefault("Namespace", "default"), job["ID"]
        if body.get("EnforceIndex") and body.get("JobModifyIndex") == 0 and key in self.jobs:
            index = self.jobs[key]["JobModifyIndex"]
            text = f"Enforcing job modify index 0: job exists with conflicting job modify index: {index}"
            return web.Response(status=500, text=text)
        if not job.get("Datacenters"):
            return web.Response(status=500, text="1 error occurred:\n\t* Missing job datacenters\n\n")
        index = self.step()
        self.jobs[key] = {**job, "Status": "pending", "SubmitTime": time.time_ns(), "JobModifyIndex": index}
        self.jobs[key]["CreateIndex"] = index
        evaluation = self.evaluate(self.jobs[key])
        self.spawn(self.place(self.jobs[key], evaluation))
        return {"EvalID": evaluation["ID"], "JobModifyIndex": index}

    def evaluate(self, job: dict[str, Any]) -> dict[str, Any]:
        evaluation = {
            "ID": str(uuid.uuid4()),
            "JobID": job["ID"],
            "Namespace": job["Namespace"],
            "JobModifyIndex": job["JobModifyIndex"],
            "Status": "pending",
            "FailedTGAllocs": None,
            "CreateIndex": self.step(),
        }
        self.evaluations.append(evaluation)
        return evaluation

    async def place(self, job: dict[str, Any], evaluation: dict[str, Any]) -> None:
        """Place a job as the scheduler does; try again while the nodes are full."""
        await asyncio.sleep(self.settings["place_delay_s"])
        while self.jobs.get((job["Namespace"], job["ID"])) is job:
            metrics = self.metrics(job)
            if metrics is None:
                sandbox = Sandbox(
                    self, job, self.settings["nodes"][self.index % len(self.settings["nodes"])], evaluation["ID"]
                )
                self.sandboxes[sandbox.data["ID"]] = sandbox
                job["Status"] = "running"
                evaluation["Status"] = "complete"
                self.step()
                await sandbox.run()
                job["Status"] = "dead"
                self.step()
                return
            if evaluation["FailedTGAllocs"] is None:
                evaluation.update(Status="complete", FailedTGAllocs={TASK: metrics})
                self.step()
            await asyncio.sleep(0.05)

    def metrics(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Return why a job can't be placed; None if it can."""
        task = job["TaskGroups"][0]["Tasks"][0]
        alive = [each for each in self.sandboxes.values() if each.data["ClientStatus"] not in ENDED]
        nodes = len(self.settings["nodes"])
        if not nodes:
            return {"NodesEvaluated": 0, "NodesAvailable": {"dc1": 0}}
        if task["Driver"] not in self.settings["drivers"]:
            why = {f"missing drivers: {task['Driver']}": nodes}
            return {"NodesEvaluated": nodes, "NodesFiltered": nodes, "ConstraintFiltered": why}
        for each in job.get("Constraints") or []:
            if each["RTarget"] != "sandboxes":
                why = {f"{each['LTarget']} {each['Operand']} {each['RTarget']}": nodes}
                return {"NodesEvaluated": nodes, "NodesFiltered": nodes, "ConstraintFiltered": why}
        if task["Resources"].get("Devices"):
            return {"NodesEvaluated": nodes, "ConstraintFiltered": {"missing devices": nodes}}
        if len(alive) >= self.settings["capacity"]:
            return {"NodesEvaluated": nodes, "NodesExhausted": nodes, "DimensionExhausted": {"memory": nodes}}
        return None

    async def list_jobs(self, request: web.Request) -> Any:
        namespace, prefix = request.query.get("namespace", "default"), request.query.get("prefix", "")
        found = sorted(key for key in self.jobs if namespace in ("*", key[0]) and key[1].startswith(prefix))
        size = min(int(request.query.get("per_page", 500)), self.settings["page_size"])
        begin = next((at for at, key in enumerate(found) if "/".join(key) >= request.query.get("next_token", "")), 0)
        rest = found[begin + size :]
        keys = ("ID", "Namespace", "Status", "SubmitTime", *(["Meta"] if request.query.get("meta") else []))
        page = [{name: self.jobs[key].get(name) for name in keys} for key in found[begin : begin + size]]
        return page, {"X-Nomad-NextToken": "/".join(rest[0])} if rest else {}

    async def show_job(self, request: web.Request) -> Any:
        return self.jobs.get(self._key(request)) or web.Response(status=404, text="job not found")

    async def delete_job(self, request: web.Request) -> Any:
        assert request.query.get("purge") == "true"
        job = self.jobs.pop(self._key(request), None)
        if job is None:
            return web.Response(status=404, text="job not found")
        for sandbox in self.of_job(request):
            sandbox.change(DesiredStatus="stop", DesiredDescription="alloc not needed due to job update")
            self.spawn(sandbox.end("complete", "Sent interrupt"))
        evaluation = self.evaluate(job)
        evaluation["Status"] = "complete"
        self.step()
        return {"EvalID": evaluation["ID"]}

    def of_job(self, request: web.Request) -> list[Sandbox]:
        namespace, job = self._key(request)
        return [
            each for each in self.sandboxes.values() if (each.data["Namespace"], each.data["JobID"]) == (namespace, job)
        ]

    async def evaluations_of(self, request: web.Request) -> Any:
        namespace, job = self._key(request)
        return [each for each in self.evaluations if (each["Namespace"], each["JobID"]) == (namespace, job)]

    async def allocations_of(self, request: web.Request) -> Any:
        """Return the allocations of the job, not those of an earlier job of its id; of all if it is gone."""
        job = self.jobs.get(self._key(request))
        of_job = self.of_job(request)
        return [each.data for each in of_job if job is None or each.job["CreateIndex"] == job["CreateIndex"]]

    async def show_allocation(self, request: web.Request) -> Any:
        sandbox = self.sandboxes.get(request.match_info["id"])
        return web.Response(status=404, text="alloc not found") if sandbox is None else sandbox.data

    async def show_leader(self, request: web.Request) -> Any:
        return self.settings["leader"]

    async def show_nodes(self, request: web.Request) -> Any:
        drivers = {name: {"Detected": True, "Healthy": True} for name in self.settings["drivers"]}
        state = {"Status": "ready", "SchedulingEligibility": "eligible", "Drivers": drivers}
        return [{"ID": name, "Name": name, **state} for name in self.settings["nodes"]]

    # --- exec

    async def exec(self, request: web.Request, fault: dict[str, Any]) -> web.StreamResponse:
        if len(self.execs) >= self.settings["max_connections"]:
            return web.Response(status=429, text="Too many connections")
        socket = web.WebSocketResponse(max_msg_size=16 << 20)
        await socket.prepare(request)
        self.execs.add(socket)
        try:
            sandbox = self.sandboxes.get(request.match_info["id"])
            if sandbox is None or sandbox.ending is not None or sandbox.main is None:
                await socket.close(
                    code=1008, message=b"Unknown allocation" if sandbox is None else b"task is not running."
                )
                return socket
            process = await sandbox.spawn(json.loads(request.query["command"]))
            cut = [fault["cut_after"]] if "cut_after" in fault else None
            await self._stream(socket, process, cut, request)
        finally:
            self.execs.discard(socket)
        return socket

    async def _stream(
        self, socket: web.WebSocketResponse, process: Any, cut: list[int] | None, request: web.Request
    ) -> None:
        """Carry the streams of a process until it has ended or the websocket has. Then its output is read no more, so
        that the process waits when its pipes are full; its input ends."""

        async def send(name: str, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(FRAME_BYTES):
                if cut is not None:
                    cut[0] -= len(data)
                    if cut[0] < 0:
                        assert request.transport is not None
                        request.transport.abort()
                await socket.send_json({name: {"data": base64.b64encode(data).decode()}})

        async def take() -> None:
            async for frame in socket:
                if frame.type is not WSMsgType.TEXT:
                    return
                stdin = json.loads(frame.data).get("stdin") or {}
                if stdin.get("data") and not process.stdin.is_closing():
                    process.stdin.write(base64.b64decode(stdin["data"]))
                    try:
                        await process.stdin.drain()
                    except OSError:
                        return

        async def poll() -> None:
            while process.returncode is None:
                await asyncio.sleep(0.1)

        taking, ended = asyncio.create_task(take()), asyncio.create_task(poll())
        sending = [asyncio.create_task(send(name, getattr(process, name))) for name in ("stdout", "stderr")]
        try:
            await asyncio.wait([taking, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not socket.closed:
                for task in sending:
                    task.cancel()  # as the docker driver: what is still under way is lost
                await asyncio.gather(*sending, return_exceptions=True)
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                await socket.send_json({"exited": True, "result": {"exit_code": code}})
                await socket.close()
        except (ConnectionError, RuntimeError):
            pass  # the client is gone
        finally:
            for task in (taking, *sending):
                task.cancel()
            process.stdin.close()
            self.spawn(_forget(process, ended))

    # --- what tests do

    async def set(self, request: web.Request) -> Any:
        self.settings.update(await request.json())
        return self.settings

    async def fail(self, request: web.Request) -> Any:
        self.faults.append({"times": 1, **await request.json()})
        return {}

    async def reset(self, request: web.Request) -> Any:
        self.settings = json.loads(json.dumps(SETTINGS))
        self.faults.clear()
        self.counts.clear()
        if (await request.json()).get("purge"):  # as garbage collection does with the jobs of killed drivers
            alive = [each.data for each in self.sandboxes.values() if each.data["ClientStatus"] not in ENDED]
            running = {(each["Namespace"], each["JobID"]) for each in alive}
            self.jobs = {key: job for key, job in self.jobs.items() if key in running}
        return {}

    async def state(self, request: web.Request) -> Any:
        alive = [each.data for each in self.sandboxes.values() if each.data["ClientStatus"] not in ENDED]
        return {"jobs": [*self.jobs.values()], "alive": alive, "counts": dict(self.counts), "execs": len(self.execs)}

    async def drain(self, request: web.Request) -> Any:
        """Drain a node: end its allocations, and place replacements elsewhere. `lost` means that the node is down."""
        body = await request.json()
        for sandbox in [*self.sandboxes.values()]:
            if sandbox.data["NodeName"] == body["node"] and sandbox.data["ClientStatus"] not in ENDED:
                why = "alloc is lost since its node is down" if body.get("lost") else "alloc is being migrated"
                sandbox.change(DesiredStatus="stop", DesiredDescription=why)
                self.spawn(sandbox.end("lost" if body.get("lost") else "complete", why))
                key = sandbox.data["Namespace"], sandbox.data["JobID"]
                if key in self.jobs:
                    job = {**self.jobs[key], "Status": "running"}
                    self.jobs[key] = job
                    self.spawn(self.place(job, self.evaluate(job)))
        return {}

    async def cut(self, request: web.Request) -> Any:
        """Cut every exec."""
        for socket in [*self.execs]:
            transport = socket.get_extra_info("socket")
            if transport is not None:
                transport.shutdown(2)
        return {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.serve], client_max_size=16 << 20)
        app.add_routes(
            [
                web.post("/v1/jobs", self.register),
                web.get("/v1/jobs", self.list_jobs),
                web.get("/v1/job/{id}", self.show_job),
                web.delete("/v1/job/{id}", self.delete_job),
                web.get("/v1/job/{id}/evaluations", self.evaluations_of),
                web.get("/v1/job/{id}/allocations", self.allocations_of),
                web.get("/v1/allocation/{id}", self.show_allocation),
                web.get("/v1/status/leader", self.show_leader),
                web.get("/v1/nodes", self.show_nodes),
                web.get("/v1/client/allocation/{id}/exec", self.show_allocation),
                *(
                    web.post(f"/emulator/{name}", getattr(self, name))
                    for name in ("set", "fail", "reset", "state", "drain", "cut")
                ),
            ]
        )
        return app


async def _forget(process: Any, ended: asyncio.Task[None]) -> None:
    """Wait for the end of a process that goes on without its websocket."""
    await ended
    process._transport.close()


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="nomad-emulator-"))
    emulator = Emulator(folder)
    runner = web.AppRunner(emulator.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)  # until whoever started us has ended
    finally:
        await asyncio.gather(*(each.end("complete") for each in emulator.sandboxes.values()), return_exceptions=True)
        await runner.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
