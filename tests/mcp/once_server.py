"""A server that starts once, for the check of a run, and never again; `sys.argv[1]` is made the first time."""

import json
import sys

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        version = request.get("params", {}).get("protocolVersion", "")
        about = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "o", "version": "1"}}
        result = {"tools": []} if request["method"] == "tools/list" else about
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
