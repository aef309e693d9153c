"""For authors of plugins and demos: a model server that plays a script; `conformance`, the kit for backends."""

from hermes_core.testing.scripted_server import Call, Fault, Reply, ScriptedServer, ToolScript, call

__all__ = ["Call", "Fault", "Reply", "ScriptedServer", "ToolScript", "call"]
