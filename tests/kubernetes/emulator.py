"""An emulator of the API server of Kubernetes: pods that run, pod exec, reviews of access, and claims of agent-sandbox.

It serves only the requests that our backend and kubectl send, from the documented API. `python -m
tests.kubernetes.emulator FOLDER` writes a kubeconfig into the folder and prints its path. Faults are asked for on the
path `/-/`.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from tests.kubernetes.node import Pod, now

CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{ns}/sandboxclaims"
TOKEN_FILE, KUBECONFIG, CERTIFICATE = "token", "kubeconfig", "ca.pem"
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
CHUNK = 32 << 10
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def status(code: int, reason: str, message: str, **details: Any) -> dict[str, Any]:
    """Return an object `Status`."""
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**kind, "message": message, "reason": reason, "details": details, "code": code}


class ApiRefusal(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class ApiServer:
    """The API server and its one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[tuple[str, str], Pod] = {}
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.pools: dict[str, dict[str, Any]] = {}
        self.faults: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.options: dict[str, Any] = {"quota": None, "denied": [], "claims": True}
        self._version = 0
        self._execs: set[asyncio.Task[Any]] = set()
        self._work: set[asyncio.Task[Any]] = set()

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(middlewares=[self._guard], client_max_size=4 << 20)
        pods = "/api/v1/namespaces/{ns}/pods"
        app.add_routes(
            [
                web.get("/version", self._version_of_server),
                web.get("/api", lambda _: _json({"kind": "APIVersions", "versions": ["v1"]})),
                web.get("/apis", lambda _: _json({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})),
                web.get("/api/v1", self._resources),
                web.get(pods, self._list_pods),
                web.post(pods, self._create_pod),
                web.get(pods + "/{name}", self._read_pod),
                web.delete(pods + "/{name}", self._delete_pod),
                web.get(pods + "/{name}/exec", self._exec),
                web.get(CLAIMS.partition("/namespaces")[0], self._claims_group),
                web.get(CLAIMS, self._list_claims),
                web.post(CLAIMS, self._create_claim),
                web.get(CLAIMS + "/{name}", self._read_claim),
                web.delete(CLAIMS + "/{name}", self._delete_claim),
                web.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review),
                web.post("/-/{what}", self._control),
            ]
        )
        return app

    # ---- what every request goes through

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/-/"):
            return await handler(request)
        self.log.append(f"{request.method} {request.path_qs}")
        await request.read()  # a request that has arrived is carried out, also if its sender leaves
        fault = self._fault(request)
        if fault.get("delay_s"):
            await asyncio.sleep(fault["delay_s"])
        if "status" in fault:
            headers = {"Retry-After": str(fault["retry_after"])} if "retry_after" in fault else {}
            body = status(fault["status"], fault.get("reason", ""), fault.get("message", "a fault"))
            return web.json_response(body, status=fault["status"], headers=headers)
        if request.headers.get("Authorization") != f"Bearer {(self.folder / TOKEN_FILE).read_text()}":
            return web.json_response(status(401, "Unauthorized", "Unauthorized"), status=401)
        request["fault"] = fault
        try:
            answer = await handler(request)
        except ApiRefusal as refusal:
            body = status(refusal.code, refusal.reason, str(refusal))
            return web.json_response(body, status=refusal.code)
        if fault.get("lose_answer") and request.transport is not None:
            request.transport.abort()
        return answer

    def _fault(self, request: web.Request) -> dict[str, Any]:
        for fault in self.faults:
            if re.fullmatch(fault["request"], f"{request.method} {request.path}"):
                if fault.get("after", 0) > 0:
                    fault["after"] -= 1
                elif fault.setdefault("times", 1) != 0:
                    fault["times"] -= 1
                    return fault
        return {}

    async def _control(self, request: web.Request) -> web.Response:
        what, given = request.match_info["what"], await request.json()
        if what == "fault":
            self.faults.append(given)
        elif what == "clear":
            self.faults.clear()
            self.options.update(quota=None, denied=[], claims=True)
        elif what == "set":
            self.options.update(given)
        elif what == "evict":
            pod = self.pods[given["namespace"], given["name"]]
            await pod.end("Evicted", "The node was low on resource: memory.")
        elif what == "pool":
            self.pools[given["name"]] = given["spec"]
        elif what == "cut":
            for task in [*self._execs]:
                task.cancel()
        elif what == "log":
            log, self.log = self.log, []
            return web.json_response(log)
        elif what == "pods":
            return web.json_response([pod.body for pod in self.pods.values()])
        return web.json_response({})

    # ---- discovery, for kubectl

    async def _version_of_server(self, request: web.Request) -> web.Response:
        return _json({"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"})

    async def _resources(self, request: web.Request) -> web.Response:
        verbs = ["create", "delete", "get", "list"]
        pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": verbs}
        return _json({"kind": "APIResourceList", "groupVersion": "v1", "resources": [{**pods, "shortNames": ["po"]}]})

    async def _review(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = body["spec"]["resourceAttributes"]
        name = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        allowed = f"{asked['verb']} {name}" not in self.options["denied"]
        return web.json_response({**body, "status": {"allowed": allowed}}, status=201)

    # ---- pods

    async def _list_pods(self, request: web.Request) -> web.Response:
        found = [pod.body for (ns, _), pod in self.pods.items() if ns == request.match_info["ns"]]
        return self._page(
            request, [each for each in found if selects(request.query.get("labelSelector", ""), each)], "PodList"
        )

    def _page(self, request: web.Request, found: list[dict[str, Any]], kind: str) -> web.Response:
        found.sort(key=lambda each: str(each["metadata"]["name"]))
        after = base64.b64decode(request.query.get("continue", "")).decode()
        rest = [each for each in found if each["metadata"]["name"] > after]
        limit = int(request.query.get("limit", 0)) or len(rest)
        more = base64.b64encode(rest[limit - 1]["metadata"]["name"].encode()).decode() if len(rest) > limit else ""
        metadata = {"resourceVersion": str(self._version), **({"continue": more} if more else {})}
        return _json({"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": rest[:limit]})

    async def _create_pod(self, request: web.Request) -> web.Response:
        namespace, body = request.match_info["ns"], await request.json()
        check_pod(body)
        if namespace == "missing":
            raise ApiRefusal(404, "NotFound", f'namespaces "{namespace}" not found')
        key = namespace, body["metadata"]["name"]
        if key in self.pods:
            deleting = "object is being deleted: " if "deletionTimestamp" in self.pods[key].body["metadata"] else ""
            raise ApiRefusal(409, "AlreadyExists", f'{deleting}pods "{key[1]}" already exists')
        quota = self.options["quota"]
        if quota is not None and len(self.pods) >= quota:
            words = f'pods "{key[1]}" is forbidden: exceeded quota: rollouts, requested: pods=1, used: pods={quota}'
            raise ApiRefusal(403, "Forbidden", words)
        return web.json_response(self.add_pod(namespace, body).body, status=201)

    def add_pod(self, namespace: str, body: dict[str, Any]) -> Pod:
        """Store a pod, and start it."""
        body["metadata"].update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
        pod = Pod(body, self.folder, lambda: self._touch(body))
        self.pods[namespace, body["metadata"]["name"]] = pod
        self._touch(body)
        pod.start()
        return pod

    def _touch(self, body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)

    def _pod(self, request: web.Request) -> Pod:
        key = request.match_info["ns"], request.match_info["name"]
        if key not in self.pods:
            raise ApiRefusal(404, "NotFound", f'pods "{key[1]}" not found')
        return self.pods[key]

    async def _read_pod(self, request: web.Request) -> web.Response:
        return _json(self._pod(request).body)

    async def _delete_pod(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        options = await request.json() if request.can_read_body else {}
        given = (options or {}).get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        grace = float(given if given is not None else pod.body["spec"].get("terminationGracePeriodSeconds", 30))
        first = "deletionTimestamp" not in pod.body["metadata"]
        pod.body["metadata"].update(deletionTimestamp=now(), deletionGracePeriodSeconds=int(grace))
        self._touch(pod.body)
        if grace == 0:
            self._forget(pod)
        if first:
            self._spawn(self._end(pod, grace))
        return _json(pod.body)

    async def _end(self, pod: Pod, grace: float) -> None:
        await pod.stop(grace)
        self._forget(pod)

    def _forget(self, pod: Pod) -> None:
        self.pods.pop((pod.body["metadata"]["namespace"], pod.body["metadata"]["name"]), None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # ---- claims of agent-sandbox, and their controller

    async def _claims_group(self, request: web.Request) -> web.Response:
        if not self.options["claims"]:
            raise ApiRefusal(404, "NotFound", "the server could not find the requested resource")
        return _json({"kind": "APIResourceList", "groupVersion": "extensions.agents.x-k8s.io/v1beta1", "resources": []})

    async def _list_claims(self, request: web.Request) -> web.Response:
        found = [claim for (ns, _), claim in self.claims.items() if ns == request.match_info["ns"]]
        selected = [each for each in found if selects(request.query.get("labelSelector", ""), each)]
        return self._page(request, selected, "SandboxClaimList")

    async def _create_claim(self, request: web.Request) -> web.Response:
        namespace, claim = request.match_info["ns"], await request.json()
        key = namespace, claim["metadata"]["name"]
        if key in self.claims:
            raise ApiRefusal(409, "AlreadyExists", f'sandboxclaims "{key[1]}" already exists')
        claim["metadata"].update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
        claim["status"] = {"conditions": []}
        self.claims[key] = claim
        self._spawn(self._control_claim(key, claim))
        return web.json_response(claim, status=201)

    async def _control_claim(self, key: tuple[str, str], claim: dict[str, Any]) -> None:
        """Give a claim a sandbox, and delete it when its pod has finished or its time is over."""
        pool = claim["spec"]["warmPoolRef"]["name"]
        if pool not in self.pools:
            message = f'SandboxWarmPool "{pool}" not found'
            self._set_ready(claim, "False", "WarmPoolNotFound", message)
            return
        body = {"metadata": {"name": f"{pool}-{uuid.uuid4().hex[:5]}"}, "spec": copy.deepcopy(self.pools[pool])}
        pod = self.add_pod(key[0], body)
        claim["status"]["sandbox"] = {"name": body["metadata"]["name"]}
        self._set_ready(claim, "False", "DependenciesNotReady", "Pod is not ready")
        while pod.body["status"]["phase"] == "Pending":
            await asyncio.sleep(0.05)
        self._set_ready(claim, "True", "DependenciesReady", "Pod is ready")
        end = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"]).timestamp()
        with suppress(TimeoutError):
            async with asyncio.timeout(end - time.time()):
                await pod.ended.wait()
                claim["status"]["conditions"].append({"type": "Finished", "status": "True"})
        await self._end_claim(key)

    def _set_ready(self, claim: dict[str, Any], value: str, reason: str, message: str) -> None:
        ready = {"type": "Ready", "status": value, "reason": reason, "message": message}
        claim["status"]["conditions"] = [ready]

    def _claim(self, request: web.Request) -> dict[str, Any]:
        key = request.match_info["ns"], request.match_info["name"]
        if key not in self.claims:
            raise ApiRefusal(404, "NotFound", f'sandboxclaims "{key[1]}" not found')
        return self.claims[key]

    async def _read_claim(self, request: web.Request) -> web.Response:
        return _json(self._claim(request))

    async def _delete_claim(self, request: web.Request) -> web.Response:
        claim = self._claim(request)
        if "deletionTimestamp" not in claim["metadata"]:
            claim["metadata"]["deletionTimestamp"] = now()
            self._spawn(self._end_claim((claim["metadata"]["namespace"], claim["metadata"]["name"])))
        return _json(claim)

    async def _end_claim(self, key: tuple[str, str]) -> None:
        name = self.claims[key]["status"].get("sandbox", {}).get("name")
        if pod := self.pods.get((key[0], name)):
            await self._end(pod, 1)
        self.claims.pop(key, None)

    # ---- exec

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        if pod.body["status"]["phase"] != "Running" or pod.machine is None:
            phase = pod.body["status"]["phase"]
            words = f"cannot exec into a container in a completed pod; current phase is {phase}"
            raise ApiRefusal(400 if pod.ended.is_set() else 500, "BadRequest", words)
        socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=32 << 20)
        await socket.prepare(request)
        if socket.ws_protocol is None:
            await socket.close()
            return socket
        working = asyncio.create_task(self._serve_exec(request, pod, socket))
        self._execs.add(working)
        try:
            await asyncio.wait([working])
        finally:
            self._execs.discard(working)
        if working.cancelled() and request.transport is not None:
            request.transport.abort()
        elif (error := working.exception()) is not None and not isinstance(error, ConnectionError):
            raise error
        return socket

    async def _serve_exec(self, request: web.Request, pod: Pod, socket: web.WebSocketResponse) -> None:
        """Carry the three streams of a program. When the client leaves, the program goes on without them."""
        query = request.query
        ins, outs, errs = os.pipe(), os.pipe(), os.pipe()
        loop = asyncio.get_running_loop()
        process = await pod.run(pod.main, query.getall("command"), stdin=ins[0], stdout=outs[1], stderr=errs[1])
        for end in (ins[0], outs[1], errs[1]):
            os.close(end)
        budget = [request["fault"].get("cut_after_bytes")]

        async def carry(end: int, number: int) -> None:
            reader = asyncio.StreamReader(limit=CHUNK)
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb")
            )
            try:
                while data := await reader.read(CHUNK):
                    await socket.send_bytes(bytes([number]) + data)
                    if budget[0] is not None:
                        budget[0] -= len(data)
                        if budget[0] < 0 and request.transport is not None:
                            request.transport.abort()
            finally:
                transport.close()

        async def feed() -> None:
            transport, protocol = await loop.connect_write_pipe(
                asyncio.streams.FlowControlMixin, os.fdopen(ins[1], "wb")
            )
            writer = asyncio.StreamWriter(transport, protocol, None, loop)
            try:
                async for message in socket:
                    if message.type is not WSMsgType.BINARY:
                        return
                    if message.data[0] == CLOSE and message.data[1:] == bytes([STDIN]):
                        writer.close()
                    elif message.data[0] == STDIN:
                        with suppress(ConnectionError):
                            writer.write(message.data[1:])
                            await writer.drain()
            finally:
                transport.abort()

        feeding = asyncio.create_task(feed())
        carrying = asyncio.gather(carry(outs[0], STDOUT), carry(errs[0], STDERR), return_exceptions=True)
        try:
            await asyncio.wait([feeding, carrying], return_when=asyncio.FIRST_COMPLETED)
            if carrying.done():
                code = await process.wait()
                await socket.send_bytes(bytes([STATUS]) + json.dumps(exit_object(code)).encode())
                await socket.close()
        finally:
            feeding.cancel()
            carrying.cancel()
            await asyncio.wait([feeding])
            with suppress(asyncio.CancelledError):
                await carrying

    async def close(self) -> None:
        """End all pods."""
        for pod in [*self.pods.values()]:
            await pod.stop(0)


def exit_object(code: int) -> dict[str, Any]:
    """Return the object `Status` that ends an exec."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = 128 - code if code < 0 else code
    message = f"command terminated with non-zero exit code: exit status {code}"
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return status(500, "NonZeroExitCode", message, causes=causes)


def check_pod(body: Mapping[str, Any]) -> None:
    """Refuse a pod that the API server would not take."""
    metadata, spec = body["metadata"], body["spec"]
    problems = [] if NAME.fullmatch(metadata["name"]) else ["metadata.name: Invalid value"]
    problems += [
        f"metadata.labels: Invalid value: {value!r}"
        for value in metadata.get("labels", {}).values()
        if not LABEL.fullmatch(value)
    ]
    problems += [
        f"metadata.annotations: Invalid value: {value!r}"
        for value in metadata.get("annotations", {}).values()
        if not isinstance(value, str)
    ]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        security = container.get("securityContext", {})
        added = security.get("capabilities", {}).get("add", ())
        if security.get("allowPrivilegeEscalation") is False and (
            "CAP_SYS_ADMIN" in added or security.get("privileged")
        ):
            problems.append("securityContext: cannot set allowPrivilegeEscalation to false and add CAP_SYS_ADMIN")
        if len(json.dumps(container)) > 1 << 20:
            problems.append("too large")
    if problems:
        raise ApiRefusal(422, "Invalid", f'Pod "{metadata["name"]}" is invalid: {"; ".join(problems)}')


def selects(selector: str, body: Mapping[str, Any]) -> bool:
    """Return whether a label selector, of terms `name` and `name=value`, selects an object."""
    labels = body["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value.lstrip("=")):
            return False
    return True


def _json(body: Mapping[str, Any]) -> web.Response:
    return web.json_response(body)


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Write a kubeconfig for this server, and return its path."""
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / CERTIFICATE)}
    cluster = {"name": "emulator", "cluster": server}
    user = {"name": "tester", "user": {"tokenFile": str(folder / TOKEN_FILE)}}
    context = {"name": "emulator", "context": {"cluster": "emulator", "user": "tester", "namespace": "rollouts"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "emulator"}
    text = json.dumps({**config, "clusters": [cluster], "users": [user], "contexts": [context]})
    (folder / KUBECONFIG).write_text(text)
    return folder / KUBECONFIG


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for this server. Return its path and that of its key. kubectl sends tokens only over TLS."""
    certificate, key = folder / CERTIFICATE, folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=emulator", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def main(folder: Path) -> None:
    """Serve until standard input ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKEN_FILE).write_text("secret-token")
    encryption = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    encryption.load_cert_chain(*make_certificate(folder))
    emulator = ApiServer(folder)
    runner = web.AppRunner(emulator.app(), handler_cancellation=False, max_line_size=1 << 20, max_field_size=1 << 20)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=encryption)
    await site.start()
    print(write_kubeconfig(folder, runner.addresses[0][1]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await emulator.close()
    await runner.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
