"""The driver's requests, each done once and answered as often as it is asked: commands, processes, slots."""

from __future__ import annotations

import os
import time

from . import wire
from .execution import Execution, Ring, Spool, Stream
from .slot import PREPARE, Slot

MAX_REQUESTS = 8192
MAX_BACKGROUND = 64


class Refusal(Exception):
    """A request that cannot be done; `kind` is an ErrorKind's word."""

    def __init__(self, kind, code, message):
        super().__init__(message)
        self.error = {"kind": kind, "code": code, "message": message}


class Request:
    """One request by its id: asked again, it is answered again, never done twice."""

    __slots__ = ("execution", "reply", "timer")

    def __init__(self):
        self.execution = None
        self.reply = None
        self.timer = None


class Requests:
    """Keeps every request until the driver has confirmed its answer."""

    def __init__(self, daemon):
        self._daemon = daemon
        self._requests = {}

    def known(self):
        """The ids of all requests that are not confirmed yet."""
        return list(self._requests)

    def handle(self, header, body):
        """Do, repeat or steer one request."""
        op = header.get("op")
        if op == "ack":
            for identity in header["ids"]:
                request = self._requests.get(identity)
                if request is not None and request.reply is not None:
                    del self._requests[identity]
            return
        identity = header["id"]
        if op in ("in", "credit", "cancel"):
            self._control(op, self._requests.get(identity), header, body)
            return
        known = self._requests.get(identity)
        if known is not None:
            self._again(known, header)
            return
        request = Request()
        self._requests[identity] = request
        try:
            if len(self._requests) > MAX_REQUESTS:
                raise Refusal("infra", "busy", "too many requests under way")
            handler = getattr(self, "_op_" + str(op), None)
            if handler is None:
                raise Refusal("infra", "protocol", "unknown operation %r" % op)
            handler(request, header, body)
        except Refusal as refusal:
            self._reply(identity, {"error": refusal.error})
        except (KeyError, TypeError, ValueError) as error:
            message = "bad request %r: %s: %s" % (op, type(error).__name__, error)
            self._reply(identity, {"error": {"kind": "infra", "code": "protocol", "message": message}})

    def _again(self, request, header):
        """The driver asks again after a lost channel: repeat what it may have missed."""
        if request.execution is not None and not request.execution.ended:
            execution = request.execution
            taken = execution.stdin.taken if execution.stdin is not None else 0
            self._daemon.send({"ev": "taken", "id": execution.id, "off": taken, "resume": True})
        if request.execution is not None and isinstance(request.execution.sinks[0], Stream):
            request.execution.sinks[0].resend(header.get("have", 0))
            request.execution.resume()
        if request.reply is not None:
            self._daemon.send(*request.reply)

    def _control(self, op, request, header, body):
        if request is None or request.reply is not None:
            return
        execution = request.execution
        if op == "cancel":
            if execution is not None:
                execution.kill(0)
            elif request.timer is not None:
                request.timer.cancel()
                self._reply(header["id"], {"error": {"kind": "command", "code": "cancelled", "message": "cancelled"}})
        elif execution is None:
            return
        elif op == "in" and execution.stdin is not None:
            execution.stdin.add(header["off"], body, header.get("eof", False))
        elif op == "credit" and isinstance(execution.sinks[0], Stream):
            execution.sinks[0].confirm(header["off"])
            execution.resume()

    def _reply(self, identity, header, data=b""):
        request = self._requests.get(identity)
        if request is None or request.reply is not None:
            return
        header.update(ev="done", id=identity)
        request.reply = (header, data)
        self._daemon.send(header, data)

    def _slot(self, header):
        slot = self._daemon.slots.get(header["slot"])
        if slot is None:
            raise Refusal("infra", "no_slot", "the slot %r was never opened" % header["slot"])
        return slot

    def _op_open_slot(self, _request, header, _body):
        index = header["slot"]
        if index != PREPARE and not 0 <= index < self._daemon.config["slots"]:
            raise Refusal("infra", "no_slot", "the sandbox has %d slots" % self._daemon.config["slots"])
        slot = self._daemon.slots.setdefault(index, Slot(self._daemon, index))
        slot.open(self._settle(header["id"], {"workspace": slot.workspace}))

    def _op_recycle(self, _request, header, _body):
        self._slot(header).recycle(bool(header["wipe"]), self._settle(header["id"], {}))

    def _settle(self, identity, result):
        def reply(error):
            self._reply(identity, dict(result) if error is None else {"error": error})

        return reply

    def _op_exec(self, request, header, body):
        slot = self._slot(header)
        identity = header["id"]

        def ended(execution):
            slot.executions.pop(execution.id, None)
            self._reply_execution(execution)

        mode = header.get("mode", "capture")
        execution = Execution(slot, identity, mode, header.get("limit", 1 << 20), header.get("merge", False), ended)
        request.execution = execution
        slot.executions[identity] = execution
        if header.get("spool"):
            execution.spool = Spool(slot.spool, identity)
        self._launch(slot, execution, header, body)
        if header.get("timeout") is not None:
            execution.limit_time(header["timeout"], header.get("grace", 2.0))

    def _launch(self, slot, execution, header, body):
        """`body` is the script, if there is one, and then the first of the input."""
        script = body[: header.get("script", 0)]
        first_input = body[header.get("script", 0) :]
        cwd = os.path.join(slot.workspace, header.get("cwd") or ".")
        env = slot.environment()
        env.update(header.get("env") or {})
        message = {"cwd": cwd, "env": env}
        as_file = None
        if "builtin" in header:
            message.update(builtin=header["builtin"], args=header["args"])
        elif "argv" in header:
            message["argv"] = header["argv"]
        elif len(script) <= 100 << 10:
            message["argv"] = [self._daemon.shell, "-c", script.decode("utf-8", "surrogateescape")]
        else:
            # One argument is at most 128 KiB: the script comes in by descriptor 9, closed before its first line.
            message["argv"] = [self._daemon.shell, "-c", 'eval "exec 9<&-\n$(cat <&9)"']
            as_file = script
        wants_input = bool(header.get("input"))
        slot.spawn(execution, message, wants_input, as_file)
        if wants_input and execution.stdin is not None and (first_input or header.get("eof")):
            execution.stdin.add(0, first_input, header.get("eof", False))

    def _reply_execution(self, execution):
        if execution.error is not None:
            self._reply(execution.id, {"error": execution.error})
            return
        header = execution.outcome()
        data = b""
        header["out"] = []
        for sink in execution.sinks:
            if isinstance(sink, Stream):
                header["out"].append([0, 0, sink.total])
            else:
                head, tail = bytes(sink.head), sink.tail()
                header["out"].append([len(head), len(tail), sink.total])
                data += head + tail
        self._reply(execution.id, header, data)

    def started(self, execution):
        """A command has its pid: the answer to `start`."""
        if execution.mode == "ring":
            self._reply(execution.id, {"process": self._describe(execution)})

    def _op_start(self, request, header, body):
        slot = self._slot(header)
        running = [p for p in slot.background.values() if not p.ended]
        if len(running) >= MAX_BACKGROUND:
            raise Refusal("policy", "too_many", "%d background processes run already" % len(running))
        for identity in [i for i, p in slot.background.items() if p.ended][: -2 * MAX_BACKGROUND]:
            del slot.background[identity]

        def ended(process):
            for waiting in process.waiters:
                waiting()
            process.waiters = []
            if process.error is not None:
                slot.background.pop(process.id, None)
                self._reply(process.id, {"error": process.error})

        execution = Execution(slot, header["id"], "ring", header.get("limit", 200_000), True, ended)
        execution.waiters = []
        execution.command = header.get("label", "")
        execution.cwd = os.path.join(slot.workspace, header.get("cwd") or ".")
        slot.background[header["id"]] = execution
        self._launch(slot, execution, dict(header, input=True), body)

    def _describe(self, process):
        fields = process.outcome() if process.ended else {}
        fields.update(
            id=process.id,
            command=process.command,
            cwd=process.cwd,
            pid=process.pid,
            started=process.started,
            running=not process.ended,
            bytes=process.sinks[0].total,
            uptime=process.duration if process.ended else time.time() - process.started,
        )
        return fields

    def _process(self, header):
        process = self._slot(header).background.get(header["process"])
        if process is None:
            raise Refusal("command", "unknown_process", "no process %r in this slot" % header["process"])
        return process

    def _op_processes(self, _request, header, _body):
        processes = [self._describe(p) for p in self._slot(header).background.values()]
        self._reply(header["id"], {"processes": processes})

    def _op_poll(self, _request, header, _body):
        self._reply(header["id"], {"process": self._describe(self._process(header))})

    def _op_log(self, _request, header, _body):
        ring = self._process(header).sinks[0]
        assert isinstance(ring, Ring)
        held = ring.window()
        first = ring.total - len(held)
        offset = max(0, header["offset"])
        start = max(offset, first)
        data = held[start - first : start - first + header["limit"]]
        self._reply(header["id"], {"offset": start, "total": ring.total, "dropped": max(0, first - offset)}, data)

    def _op_wait(self, request, header, _body):
        process = self._process(header)

        def answer():
            self._reply(header["id"], {"process": self._describe(process)})

        if process.ended:
            answer()
            return
        process.waiters.append(answer)
        request.timer = self._daemon.loop.later(header["timeout"], answer)

    def _op_write(self, _request, header, body):
        process = self._process(header)
        if process.ended or process.stdin is None:
            raise Refusal("command", "ended", "the process has ended")
        room = max(0, wire.WINDOW - process.stdin.pending())
        taken = body[:room]
        process.stdin.add(process.stdin.received, taken, bool(header.get("eof")) and len(taken) == len(body))
        self._reply(header["id"], {"taken": len(taken)})

    def _op_kill(self, _request, header, _body):
        process = self._process(header)

        def answer():
            self._reply(header["id"], {"process": self._describe(process)})

        if process.ended:
            answer()
        else:
            process.waiters.append(answer)
            process.kill(header.get("grace", 2.0))

