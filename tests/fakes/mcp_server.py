"""An MCP server of the standard library alone, for sandboxes: counts the lines of a file."""

import json
import os
import pathlib
import sys

TOOL = {
    "name": "countLines",
    "description": "Count the lines of a file.",
    "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "annotations": {"readOnlyHint": True},
}


def answer(method, params):
    if method == "initialize":
        about = {"name": "lines", "version": "1"}
        capabilities = {"tools": {}}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": capabilities,
            "serverInfo": about,
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        path = pathlib.Path(params["arguments"]["path"])
        if path.name == "die":
            os._exit(1)
        while path.name in ("endless", "many"):
            print("x" * 65_536 if path.name == "endless" else "x\n" * 32_768, end="", flush=True)
        if not path.is_file():
            return {"content": [{"type": "text", "text": "no such file"}], "isError": True}
        number = len(path.read_text().splitlines())
        return {"content": [{"type": "text", "text": f"{number} lines"}], "isError": False}
    return None


if len(sys.argv) > 1:
    sys.exit(f"cannot read {sys.argv[1]}")
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    found = answer(request["method"], request.get("params") or {})
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    if found is None:
        reply["error"] = {"code": -32601, "message": "no such method"}
    else:
        reply["result"] = found
    print(json.dumps(reply), flush=True)
