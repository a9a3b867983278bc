"""Kinds of requests for the sandbox server and the environment server."""

# ruff: noqa: E501 -- a kind has one line
# fmt: off

from __future__ import annotations

import struct

from tests.adversary.kinds import MB, nested, one

FRAMES = {"content-type": "application/vnd.etude.frames"}
BOX = "/v1/sandboxes/{box}"
CALL = f"POST {BOX}/call"


def frame(head: bytes, payload: bytes = b"", head_bytes: int | None = None, size: int | None = None) -> bytes:
    """A frame, whose sizes may lie."""
    sizes = (len(head) if head_bytes is None else head_bytes, len(payload) if size is None else size)
    return struct.pack("<II", *sizes) + head + payload


def sandbox(name: str, expect: list[int], line: str, **more: object) -> None:
    """See `one`."""
    one("sandbox", name, expect, line, **more)  # type: ignore[arg-type]


def environment(name: str, expect: list[int], line: str, **more: object) -> None:
    """See `one`."""
    one("environment", name, expect, line, **more)  # type: ignore[arg-type]


# ---- sandboxes -----------------------------------------------------------------------------------

sandbox("an id that there is not", [404], "GET /v1/sandboxes/none")
sandbox("an id with a slash escaped", [404], "GET /v1/sandboxes/..%2f..%2fetc")
sandbox("an id of 30,000 characters", [404], f"GET /v1/sandboxes/{'x' * 30000}")
sandbox("a backend that there is not", [400], "GET /v1/sandboxes?backend=none")
sandbox("a backend of a lone surrogate", [400], "GET /v1/sandboxes?backend=%ed%a0%80")
sandbox("a snapshot that there is not, deleted", [404], "DELETE /v1/snapshots/none")
sandbox("a snapshot outside of the store, deleted", [400, 404], "DELETE /v1/snapshots/..%2f..")
sandbox("a snapshot that there is not, exported", [404], "GET /v1/snapshots/none/export")
sandbox("a snapshot of no bytes, imported", [400, 422], "POST /v1/snapshots/import")
sandbox("a snapshot of nonsense, imported", [400, 422], "POST /v1/snapshots/import", body=b"nonsense" * 999)
sandbox("a snapshot that is cut off, imported", [400, 422], "POST /v1/snapshots/import", body=frame(b'{"event":"piece"}', b"abc"))
sandbox("a snapshot that is none, imported", [400, 422], "POST /v1/snapshots/import", body=frame(b'{"event":"piece"}', b"abc") + frame(b'{"event":"end","num_bytes":3}'))
sandbox("a template that the server does not hold", [400], "POST /v1/sandboxes", json={"template": "none"})
sandbox("a template that leaves its root", [422], "POST /v1/sandboxes", json={"template": {"files": {"../../x": "y"}}})
sandbox("a template with an absolute path", [422], "POST /v1/sandboxes", json={"template": {"files": {"/etc/x": "y"}}})
sandbox("a template with a NUL in a path", [422], "POST /v1/sandboxes", json={"template": {"files": {"a\0b": "y"}}})
sandbox("a template of a file below a file", [400], "POST /v1/sandboxes", json={"template": {"files": {"a": "x", "a/b": "y"}}})
sandbox("a template 1,500 directories deep", [200, 400], "POST /v1/sandboxes", json={"template": {"files": {"d/" * 1500 + "f": "y"}}})
sandbox("a template with an empty path", [400], "POST /v1/sandboxes", json={"template": {"files": {"": "y"}}})
sandbox("a template with a name of 1 MB", [200, 400], "POST /v1/sandboxes", json={"template": {"name": "n" * MB, "files": {}}})
sandbox("a template of lone surrogates", [200, 400], "POST /v1/sandboxes", json={"template": {"files": {"a": "\ud800"}}})
sandbox("memory below zero", [400], "POST /v1/sandboxes", json={"resources": {"memory_bytes": -1}})
sandbox("processor time below zero", [400], "POST /v1/sandboxes", json={"resources": {"cpu_s": -1}})
sandbox("processors of 10^300", [200, 400], "POST /v1/sandboxes", json={"resources": {"cpus": 1e300}})
sandbox("memory of 10^300 bytes", [200, 400], "POST /v1/sandboxes", json={"resources": {"memory_bytes": 10**300}})
sandbox("processes that are true", [400], "POST /v1/sandboxes", json={"resources": {"num_processes": True}})
sandbox("a resource that there is not", [400], "POST /v1/sandboxes", json={"resources": {"gold": 1}})
sandbox("a network that is none", [400], "POST /v1/sandboxes", json={"network": {"allow": ["a b", "*", "::"]}})
sandbox("a time to live below zero", [400], "POST /v1/sandboxes", json={"timeout_s": -1})
sandbox("a time to live of 10^308 s", [200, 400], "POST /v1/sandboxes", json={"timeout_s": 1e308})
sandbox("a time to live of nothing", [204], f"POST {BOX}/timeout", json={"timeout_s": None})
sandbox("metadata that is no text", [400], "POST /v1/sandboxes", json={"metadata": {"a": 1}})
sandbox("an idempotency key of 60,000 bytes", [200, 400], "POST /v1/sandboxes", json={}, headers={"idempotency-key": "k" * 60000})
sandbox("a frame whose header lies", [400], "PUT /v1/templates", body=frame(b"{}", head_bytes=99), headers=FRAMES)
sandbox("a frame of 4 GB", [400], "PUT /v1/templates", body=frame(b"{}", size=2**32 - 1), headers=FRAMES)
sandbox("two frames for one", [400], "PUT /v1/templates", body=frame(b"{}") * 2, headers=FRAMES)
sandbox("a frame whose header is a list", [400], "PUT /v1/templates", body=frame(b"[]"), headers=FRAMES)
sandbox("a frame 100,000 lists deep", [400], "PUT /v1/templates", body=frame(nested(100000)), headers=FRAMES)
sandbox("a template of sizes below zero", [400], "PUT /v1/templates", body=frame(b'{"files":[["a",-3],["b",6]],"name":"x","image":null}', b"abc"), headers=FRAMES)
sandbox("a template whose sizes are texts", [400], "PUT /v1/templates", body=frame(b'{"files":[["a","3"]],"name":"x","image":null}', b"abc"), headers=FRAMES)
sandbox("a template whose files are a number", [400], "PUT /v1/templates", body=frame(b'{"files":3,"name":"x","image":null}'), headers=FRAMES)
sandbox("a template whose image is a text", [400], "PUT /v1/templates", body=frame(b'{"files":[],"name":"x","image":"y"}'), headers=FRAMES)
sandbox("a template whose name is a list", [400], "PUT /v1/templates", body=frame(b'{"files":[],"name":[],"image":null}'), headers=FRAMES)
sandbox("a template whose paths are numbers", [400], "PUT /v1/templates", body=frame(b'{"files":[[7,0]],"name":"x","image":null}'), headers=FRAMES)
sandbox("a frame of five million lists", [400], "PUT /v1/templates", body=frame(b'{"a":[' + b"[]," * (5 * MB) + b"0]}"), headers=FRAMES, slow=True)
sandbox("a file that leaves the workspace", [400, 422], CALL, json={"op": "read", "path": "../../etc/passwd"})
sandbox("a file by an absolute path", [400, 404, 422], CALL, json={"op": "read", "path": "/etc/passwd"})
sandbox("a file with a NUL in its path", [400, 404, 422], CALL, json={"op": "read", "path": "a\0b"})
sandbox("a file without a path", [400], CALL, json={"op": "read"})
sandbox("a file whose path is no UTF-8", [400, 404, 422], CALL, body=b'{"op":"read","path":"\xff\xfe"}')
sandbox("a limit that is a text", [400], CALL, json={"op": "read", "path": "a.py", "limit_bytes": "\u0663"})
sandbox("a limit of 5,000 digits", [200, 400], CALL, body=b'{"op":"read","path":"a.py","limit_bytes":' + b"9" * 5000 + b"}")
sandbox("a depth of 4,300 digits", [200, 400], CALL, body=b'{"op":"list","depth":' + b"9" * 4300 + b"}")
sandbox("the root removed", [400, 422], CALL, json={"op": "remove", "path": "."})
sandbox("files whose sizes lie", [400], CALL, body=frame(b'{"op":"write","files":[["a",99]]}', b"abc"), headers=FRAMES)
sandbox("files whose rows are texts", [400], CALL, body=frame(b'{"op":"write","files":["ab"]}'), headers=FRAMES)
sandbox("files of true bytes", [400], CALL, body=frame(b'{"op":"write","files":[["a",true]]}', b"a"), headers=FRAMES)
sandbox("a write that leaves the workspace", [422], CALL, body=frame(b'{"op":"write","files":[["../../x",3]]}', b"abc"), headers=FRAMES)
sandbox("a write of files below zero", [400], CALL, body=frame(b'{"op":"write","files":[["a",-3],["b",6]]}', b"abc"), headers=FRAMES)
sandbox("a call of nonsense", [400], CALL, body=b"\xff" * 4096, headers=FRAMES)
sandbox("a call that is a number", [400], CALL, body=frame(b"7"), headers=FRAMES)
sandbox("a call of two frames", [400], CALL, body=frame(b'{"op":"processes"}') * 2, headers=FRAMES)
sandbox("a call without an operation", [400], CALL, json={})
sandbox("a call whose operation is a list", [400], CALL, json={"op": ["read"]})
sandbox("a call that is the owner's: to stand still", [400], CALL, json={"op": "freeze"})
sandbox("a call that is the owner's: to be silent", [400], CALL, json={"op": "hold"})
sandbox("a call that is the owner's: to lend its disk", [400], CALL, json={"op": "lend"})
sandbox("a call that names its own id", [400], CALL, json={"op": "processes", "id": 1})
sandbox("a program instead of a command", [400], CALL, json={"op": "command", "cmd": "x", "argv": ["/bin/sh"]})
sandbox("a pattern that runs back", [200, 400, 422], CALL, json={"op": "grep", "pattern": "(a+)+$"})
sandbox("a pattern that does not close", [400, 422], CALL, json={"op": "grep", "pattern": "(["})
sandbox("a pattern of 10^6 repetitions", [200, 400, 422], CALL, json={"op": "grep", "pattern": "(?:a{1000}){1000}"})
sandbox("a limit of matches below zero", [400], CALL, json={"op": "grep", "pattern": "x", "limit": -1})
sandbox("a command that is a list", [400], CALL, json={"op": "command", "cmd": ["rm", "-rf"]})
sandbox("a command with a NUL", [400, 422], CALL, json={"op": "command", "cmd": "a\0b"})
sandbox("an environment of numbers", [400], CALL, json={"op": "command", "cmd": "true", "env": {"A": 1}})
sandbox("a command of a process that there is not", [400, 404, 422], CALL, json={"op": "lookup", "pid": 99999999})
sandbox("a process id of 5,000 digits", [400, 404, 422], CALL, body=b'{"op":"lookup","pid":' + b"9" * 5000 + b"}")
sandbox("a process id below zero", [200], CALL, json={"op": "kill", "pid": -1})
sandbox("tests that are no list", [400], CALL, json={"op": "tests", "paths": "x"})
sandbox("tests that leave the workspace", [200, 400, 422], CALL, json={"op": "tests", "paths": ["../../x"]})
sandbox("a pause of a kind that there is not", [400], f"POST {BOX}/pause", json={"mode": "deep"})
sandbox("a snapshot named outside of the store", [200, 400], f"POST {BOX}/snapshots", json={"kind": "filesystem", "name": "../../x"})
sandbox("forks without number", [400], f"POST {BOX}/fork", json={"count": 10**9})
sandbox("no forks", [200, 400], f"POST {BOX}/fork", json={"count": 0})
sandbox("a move to the metadata service", [400], f"POST {BOX}/migrate", json={"url": "http://169.254.169.254/"})
sandbox("a move to itself", [400], f"POST {BOX}/migrate", json={"url": "http://127.0.0.1:1/"})

# ---- environments --------------------------------------------------------------------------------

TASK = {
    "id": "t", "instruction": "i", "files": {"a.py": "x = 1\n"},
    "hidden_files": {"tests/test_h.py": "from a import x\n\n\ndef test_x():\n    assert x == 1\n"},
    "hidden_test_paths": ["tests/test_h.py"],
}  # fmt: skip
FINISHING = {"calls": [{"name": "finish"}]}

environment("the session of another tenant", [404], "GET /sessions/{other}")
environment("the session of another tenant, ended", [404], "DELETE /sessions/{other}")
environment("the session of another tenant, graded", [404], "POST /sessions/{other}/submit", json={})
environment("the diff of another tenant", [404], "GET /sessions/{other}/diff")
environment("a turn in another tenant's session", [404], "POST /sessions/{other}/turns", json={"calls": []})
environment("a fork of another tenant's session", [404], "POST /sessions", json={"fork": {"session": "{other}"}})
environment("forks of another tenant's session", [404], "POST /sessions/{other}/fork", json={"count": 1})
environment("the snapshot of another tenant", [404], "POST /sessions", json={"snapshot": "{other_snapshot}"})
environment("the snapshot of another tenant, deleted", [404], "DELETE /snapshots/{other_snapshot}")
environment("the episode of another tenant", [400, 404], "GET /openenv/state?episode_id=others-episode")
environment("the episode of another tenant, gone on with", [400, 404], "POST /openenv/step", json={"episode_id": "others-episode", "action": {"calls": []}})
environment("the episode of another tenant, begun anew", [200], "POST /openenv/reset", json={"episode_id": "others-episode"})
environment("figures of another tenant", [200], "GET /metrics")
environment("the list of sessions", [200], "GET /sessions")
environment("the list of snapshots", [200], "GET /snapshots")
environment("another tenant's tools over MCP", [404], "POST /sessions/{other}/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
environment("a token in the path of an HTTP route", [404], "POST /openenv/a-token-of-the-first-tenant/reset", json={})
environment("no source of a session", [400], "POST /sessions", json={})
environment("two sources of a session", [400], "POST /sessions", json={"task": "tally", "files": {}})
environment("a directory of the server's", [400], "POST /sessions", json={"directory": "/etc"})
environment("a repository by its URL", [400], "POST /sessions", json={"repository": "https://example.org/x.git"})
environment("a repository of a command", [400], "POST /sessions", json={"repository": "ext::sh -c id", "commit": "--upload-pack=id"})
environment("a directory with a NUL", [400], "POST /sessions", json={"directory": "/a\0b"})
environment("a directory of 10,000 parts", [400], "POST /sessions", json={"directory": "/a" * 10000})
environment("a task that there is not", [400], "POST /sessions", json={"task": "none"})
environment("a task named by a path", [400], "POST /sessions", json={"task": "../../x"})
environment("a task without tests", [200, 400], "POST /sessions", json={"task": TASK | {"hidden_files": {}, "hidden_test_paths": []}})
environment("a task whose files leave the workspace", [400], "POST /sessions", json={"task": TASK | {"files": {"../x": "y"}}})
environment("a task whose metadata is a list", [400], "POST /sessions", json={"task": TASK | {"metadata": []}})
environment("a task whose facts are numbers", [400], "POST /sessions", json={"task": TASK | {"user_facts": [1]}})
environment("files that are numbers", [400], "POST /sessions", json={"files": {"a": 1}})
environment("a file below a file", [400], "POST /sessions", json={"files": {"a": "x", "a/b": "y"}})
environment("an idle time of 10^308 s", [400], "POST /sessions", json={"files": {"a": "b"}, "idle_s": 1e308})
environment("an idle time below zero", [400], "POST /sessions", json={"files": {"a": "b"}, "idle_s": -1})
environment("resources below zero", [400], "POST /sessions", json={"files": {"a": "b"}, "resources": {"cpu_s": -5}})
environment("a call of a tool that there is not", [200], "POST /sessions/{mine}/turns", json={"calls": [{"name": "none"}]})
environment("a call whose arguments are numbers", [400], "POST /sessions/{mine}/turns", json={"calls": [{"name": "read_file", "arguments": {"path": 1}}]})
environment("a call whose error is a number", [400], "POST /sessions/{mine}/turns", json={"calls": [{"name": "x", "error": 5}]})
environment("300 calls in one turn", [400], "POST /sessions/{mine}/turns", json={"calls": [{"name": "x"}] * 300})
environment("a turn that skips turns", [400], "POST /sessions/{mine}/turns", json={"calls": [], "turn": 10**6})
environment("a turn of 10^30", [400], "POST /sessions/{mine}/turns", json={"calls": [], "turn": 10**30})
environment("results that are known of no place", [400], "POST /sessions/{mine}/turns", json={"calls": [], "known": {"x": {}}})
environment("results that are known of a false kind", [400], "POST /sessions/{mine}/turns", json={"calls": [], "known": {"0": {"output": "o", "error": "none", "finished": False, "duration_s": 0, "facts": {}}}})
environment("results that are known of place -1", [200, 400], "POST /sessions/{mine}/turns", json={"calls": [{"name": "list_dir"}], "known": {"-1": {"output": "o", "error": None, "finished": False, "duration_s": 0, "facts": {}}}})
environment("an archive that leaves the workspace", [200, 400, 422], "POST /sessions/{mine}/archive", json={"path": "../../x", "text": "y"})
environment("an archive of lone surrogates", [200, 400, 422], "POST /sessions/{mine}/archive", json={"path": "a", "text": "\ud800"})
environment("no forks", [400], "POST /sessions/{mine}/fork", json={"count": 0})
environment("forks without number", [400], "POST /sessions/{mine}/fork", json={"count": 10**9})
environment("a fork of a turn that was not", [400], "POST /sessions/{mine}/fork", json={"count": 1, "turn": 99})
environment("an ending that is ours to say", [400], "POST /sessions/{mine}/submit", json={"status": "infrastructure"})
environment("an ending that there is not", [400], "POST /sessions/{mine}/submit", json={"status": "won"})
environment("a session without a task, graded", [400, 409], "POST /sessions/{mine}/submit", json={})
environment("a seed of 10^400", [200, 400], "POST /openenv/reset", json={"seed": 10**400})
environment("turns below zero", [200, 400], "POST /openenv/reset", json={"max_turns": -1})
environment("an episode whose id is empty", [200, 400], "POST /openenv/reset", json={"episode_id": ""})
environment("an episode whose task is a list", [400], "POST /openenv/reset", json={"task": []})
environment("an action of nothing", [400], "POST /openenv/step", json={"episode_id": "others-episode", "action": {}})
environment("MCP of nonsense", [400], "POST /sessions/{mine}/mcp", body=b"nonsense")
environment("MCP that is 50,000 lists deep", [400], "POST /sessions/{mine}/mcp", body=nested(50000), headers={"accept": "application/json, text/event-stream"})
environment("MCP of a call that there is not", [200, 202, 400, 406], "POST /sessions/{mine}/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "none"}, headers={"accept": "application/json, text/event-stream"})
environment("MCP of a method that is an object", [400], "POST /sessions/{mine}/mcp", json={"jsonrpc": "2.0", "id": {}, "method": {}}, headers={"accept": "application/json, text/event-stream"})
environment("MCP of 70 MB", [0, 400, 413], "POST /sessions/{mine}/mcp", body=b'{"a":"' + b"x" * (70 * MB) + b'"}', slow=True)
