"""The control plane: apps, images, secrets and volumes, and the creation, the search and the end of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import uuid
from typing import Any

from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as pb

from hermes_modal_emulator.cloud import Image
from hermes_modal_emulator.sandboxes import EmulatedSandbox, v1_id
from hermes_modal_emulator.serving import Service

BUILDER = "2025.06"
_ENV_LINE = re.compile(r"(?m)^ENV ([A-Za-z_]\w*)=['\"]?(.*?)['\"]?$")
_NEEDS_TOKEN = re.compile(r"Sandbox\w+V2$|SandboxGetCommandRouterAccess$")
_METADATA = pb.ImageMetadata(python_version_info="3.11.9")


class ControlPlane(Service):
    """`modal.client.ModalClient`."""

    descriptor = pb.DESCRIPTOR.services_by_name["ModalClient"]

    def check(self, method: str, metadata: dict[str, str]) -> None:
        """Check the account's token for every RPC, and the session's token for RPCs that need it."""
        if metadata.get("x-modal-token-id") in self.cloud.options.refused_tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed or not valid")
        if _NEEDS_TOKEN.search(method):
            self.cloud.check_token(metadata.get("x-modal-auth-token", ""))

    # --- sessions

    async def ClientHello(self, request: Any, metadata: Any) -> Any:
        return pb.ClientHelloResponse(image_builder_version=BUILDER)

    async def AuthTokenGet(self, request: Any, metadata: Any) -> Any:
        return pb.AuthTokenGetResponse(token=self.cloud.token(self.cloud.options.auth_ttl_s))

    async def EnvironmentGetOrCreate(self, request: Any, metadata: Any) -> Any:
        settings = pb.EnvironmentSettings(image_builder_version=BUILDER)
        return pb.EnvironmentGetOrCreateResponse(
            environment_id="en-1",
            metadata=pb.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings),
        )

    async def AppGetOrCreate(self, request: Any, metadata: Any) -> Any:
        apps, name = self.cloud.apps, request.app_name
        if name not in apps:
            if request.object_creation_type != pb.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {name!r} not found")
            apps[name] = v1_id("ap")
        answer = pb.AppGetOrCreateResponse(app_id=apps[name])
        answer.handle_metadata.description, answer.handle_metadata.app_id = name, apps[name]
        return answer

    # --- images, secrets, volumes

    async def ImageGetOrCreate(self, request: Any, metadata: Any) -> Any:
        text = "\n".join(request.image.dockerfile_commands)
        digest = hashlib.sha256(request.image.SerializeToString(deterministic=True)).hexdigest()
        image_id = f"im-{digest[:22]}"
        bases = [self.cloud.images.get(base.image_id, Image({})) for base in request.image.base_images]
        env = {name: value for base in bases for name, value in base.env.items()} | dict(_ENV_LINE.findall(text))
        snapshot = next((base.snapshot for base in bases if base.snapshot is not None), None)
        self.cloud.images.setdefault(image_id, Image(env, snapshot))
        missing = next((word for word in self.cloud.options.missing_images if word in text), None)
        if missing is None:
            result = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
        else:
            said = f"manifest unknown: {missing}"
            result = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_FAILURE, exception=said)
        return pb.ImageGetOrCreateResponse(image_id=image_id, result=result, metadata=_METADATA)

    async def MountBatchedCheckExistence(self, request: Any, metadata: Any) -> Any:
        unknown = [each for each in request.sha256_hex_hashes if each not in self.cloud.files]
        return pb.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=unknown)

    async def MountPutFile(self, request: Any, metadata: Any) -> Any:
        self.cloud.files.add(request.sha256_hex)
        return pb.MountPutFileResponse(exists=True)

    async def MountGetOrCreate(self, request: Any, metadata: Any) -> Any:
        return pb.MountGetOrCreateResponse(mount_id=v1_id("mo"))

    async def ImageFromId(self, request: Any, metadata: Any) -> Any:
        if request.image_id not in self.cloud.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        return pb.ImageFromIdResponse(image_id=request.image_id, metadata=_METADATA)

    async def SecretGetOrCreate(self, request: Any, _: Any) -> Any:
        name = request.deployment_name
        if name and not request.env_dict:
            if name not in self.cloud.named_secrets:
                raise GRPCError(Status.NOT_FOUND, f"Secret {name!r} not found in environment 'main'")
            secret_id = self.cloud.named_secrets[name]
            missing = [key for key in request.required_keys if key not in self.cloud.secrets[secret_id]]
            if missing:
                raise GRPCError(Status.NOT_FOUND, f"Secret is missing key(s): {', '.join(missing)}")
        else:
            secret_id = self.cloud.add_secret(name, dict(request.env_dict))
        metadata = pb.SecretMetadata(name=name, keys=sorted(self.cloud.secrets[secret_id]))
        return pb.SecretGetOrCreateResponse(secret_id=secret_id, metadata=metadata)

    async def VolumeGetOrCreate(self, request: Any, metadata: Any) -> Any:
        name = request.deployment_name or uuid.uuid4().hex
        if name not in self.cloud.volumes and request.object_creation_type == pb.OBJECT_CREATION_TYPE_UNSPECIFIED:
            raise GRPCError(Status.NOT_FOUND, f"Volume {name!r} not found in environment 'main'")
        volume_id = self.cloud.volumes.setdefault(name, v1_id("vo"))
        (self.cloud.folder / "volumes" / volume_id).mkdir(parents=True, exist_ok=True)
        return pb.VolumeGetOrCreateResponse(volume_id=volume_id, metadata=pb.VolumeMetadata(name=name))

    # --- sandboxes

    async def SandboxCreate(self, request: Any, metadata: dict[str, str]) -> Any:
        key = metadata.get("x-idempotency-key") or uuid.uuid4().hex
        sandbox = await self.cloud.create(request, v2=False, key=key)
        return pb.SandboxCreateResponse(sandbox_id=sandbox.id, metadata=_metadata(sandbox))

    async def SandboxCreateV2(self, request: Any, metadata: dict[str, str]) -> Any:
        key = metadata.get("x-idempotency-key") or uuid.uuid4().hex
        sandbox = await self.cloud.create(request, v2=True, key=key)
        access = pb.CommandRouterAccess(**self._access(sandbox))
        return pb.SandboxCreateV2Response(
            sandbox_id=sandbox.id,
            task_id=sandbox.task_id,
            metadata=_metadata(sandbox),
            sandbox_token="sbt-x",
            tunnels=_tunnels(sandbox),
            command_router_access=access,
        )

    async def SandboxGetCommandRouterAccess(self, request: Any, metadata: Any) -> Any:
        sandbox = self.cloud.sandbox(request.sandbox_id) if request.sandbox_id else self.cloud.task(request.task_id)
        return pb.SandboxGetCommandRouterAccessResponse(**self._access(sandbox))

    async def TaskGetCommandRouterAccess(self, request: Any, metadata: Any) -> Any:
        return pb.TaskGetCommandRouterAccessResponse(**self._access(self.cloud.task(request.task_id)))

    def _access(self, sandbox: EmulatedSandbox) -> dict[str, str]:
        if sandbox.result is not None:
            raise GRPCError(Status.FAILED_PRECONDITION, "Sandbox has already finished")
        return {"url": self.cloud.url, "jwt": self.cloud.token(self.cloud.options.router_ttl_s, task=sandbox.task_id)}

    async def SandboxGetTaskId(self, request: Any, metadata: Any) -> Any:
        sandbox = self.cloud.sandbox(request.sandbox_id)
        if sandbox.result is not None:
            return pb.SandboxGetTaskIdResponse(task_result=sandbox.result)
        return pb.SandboxGetTaskIdResponse(task_id=sandbox.task_id)

    SandboxGetTaskIdV2 = SandboxGetTaskId

    async def SandboxWait(self, request: Any, metadata: Any) -> Any:
        sandbox = self.cloud.sandbox(request.sandbox_id)
        if sandbox.result is None and request.timeout > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sandbox.finished.wait(), request.timeout)
        return pb.SandboxWaitResponse(result=sandbox.result, metadata=_metadata(sandbox))

    SandboxWaitV2 = SandboxWait

    async def SandboxTerminate(self, request: Any, metadata: Any) -> Any:
        sandbox = self.cloud.sandbox(request.sandbox_id)
        before = sandbox.result
        sandbox.finish(pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_TERMINATED))
        return pb.SandboxTerminateResponse(existing_result=before)

    SandboxTerminateV2 = SandboxTerminate

    async def SandboxTagsSet(self, request: Any, metadata: Any) -> Any:
        self.cloud.sandbox(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return empty_pb2.Empty()

    SandboxTagsSetV2 = SandboxTagsSet

    async def SandboxTagsGet(self, request: Any, metadata: Any) -> Any:
        return pb.SandboxTagsGetResponse(tags=_tags(self.cloud.sandbox(request.sandbox_id)))

    SandboxTagsGetV2 = SandboxTagsGet

    async def SandboxList(self, request: Any, metadata: Any) -> Any:
        return self._list(request, v1_only=True)

    async def SandboxListV2(self, request: Any, metadata: Any) -> Any:
        return self._list(request, v1_only=False)

    def _list(self, request: Any, *, v1_only: bool) -> Any:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = [
            each
            for each in self.cloud.sandboxes.values()
            if (each.result is None or request.include_finished)
            and not (v1_only and each.v2)
            and (not request.app_id or each.app_id == request.app_id)
            and wanted.items() <= each.tags.items()
            and (not request.before_timestamp or each.created < request.before_timestamp)
        ]
        found.sort(key=lambda each: -each.created)
        return pb.SandboxListResponse(sandboxes=[_info(each) for each in found[: self.cloud.options.page_size]])

    async def SandboxGetFromName(self, request: Any, metadata: Any) -> Any:
        return self._by_name(request, v2=False)

    async def SandboxGetFromNameV2(self, request: Any, metadata: Any) -> Any:
        return self._by_name(request, v2=True)

    def _by_name(self, request: Any, *, v2: bool) -> Any:
        app_id = self.cloud.apps.get(request.app_name)
        found = [
            each
            for each in self.cloud.sandboxes.values()
            if each.v2 == v2 and each.definition.name == request.sandbox_name and each.app_id == app_id
        ]
        found = [each for each in found if each.result is None] or (found if request.include_terminated else [])
        if not found:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_name!r} not found")
        newest = max(found, key=lambda each: each.created)
        return pb.SandboxGetFromNameResponse(sandbox_id=newest.id, metadata=_metadata(newest))

    async def SandboxGetTunnels(self, request: Any, metadata: Any) -> Any:
        done = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
        return pb.SandboxGetTunnelsResponse(result=done, tunnels=_tunnels(self.cloud.sandbox(request.sandbox_id)))

    SandboxGetTunnelsV2 = SandboxGetTunnels

    async def SandboxSnapshotFs(self, request: Any, metadata: Any) -> Any:
        image_id = await self.cloud.snapshot(self.cloud.sandbox(request.sandbox_id))
        done = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
        return pb.SandboxSnapshotFsResponse(image_id=image_id, result=done)

    async def SandboxStdinWrite(self, request: Any, metadata: Any) -> Any:
        main = self.cloud.sandbox(request.sandbox_id).main
        await main.write(main.written, request.input, eof=request.eof)
        return pb.SandboxStdinWriteResponse()

    async def SandboxGetLogs(self, request: Any, sink: Any) -> None:
        main = self.cloud.sandbox(request.sandbox_id).main
        log = main.out if request.file_descriptor == pb.FILE_DESCRIPTOR_STDOUT else main.err
        async for offset, chunk in log.read_from(int(request.last_entry_id or 0)):
            item = pb.TaskLogs(data=chunk.decode(errors="replace"), file_descriptor=request.file_descriptor)
            await sink.send(pb.TaskLogsBatch(entry_id=str(offset + len(chunk)), items=[item]), len(chunk))
        await sink.send(pb.TaskLogsBatch(entry_id=str(log.end), eof=True), 0)


def _metadata(sandbox: EmulatedSandbox) -> Any:
    metadata = pb.SandboxHandleMetadata(app_id=sandbox.app_id)
    if sandbox.result is not None:
        metadata.result.CopyFrom(sandbox.result)
    return metadata


def _tags(sandbox: EmulatedSandbox) -> list[Any]:
    return [pb.SandboxTag(tag_name=name, tag_value=value) for name, value in sandbox.tags.items()]


def _info(sandbox: EmulatedSandbox) -> Any:
    return pb.SandboxInfo(
        id=sandbox.id,
        created_at=sandbox.created,
        app_id=sandbox.app_id,
        name=sandbox.definition.name,
        metadata=_metadata(sandbox),
        task_info=pb.TaskInfo(id=sandbox.task_id, started_at=sandbox.created, sandbox_id=sandbox.id),
        tags=_tags(sandbox),
    )


def _tunnels(sandbox: EmulatedSandbox) -> list[Any]:
    return [
        pb.TunnelData(
            host="127.0.0.1",
            port=port.port,
            container_port=port.port,
            unencrypted_host="127.0.0.1" if port.unencrypted else "",
            unencrypted_port=port.port if port.unencrypted else 0,
        )
        for port in sandbox.definition.open_ports.ports
    ]
