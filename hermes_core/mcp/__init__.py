"""MCP servers: their settings, their programs and connections, and their tools as tools of a rollout."""
