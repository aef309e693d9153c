"""The `local` backend: sandboxes as process trees on this host, in namespaces of their own where the host allows."""
