"""Tools of MCP servers: how servers are named, run and connected, and how their tools become tools of a rollout."""
