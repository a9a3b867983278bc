"""Acts on names, sizes, kinds of files, rights, times, the workspace and its tools."""

from __future__ import annotations

from collections.abc import Mapping

FILES: Mapping[str, str] = {
    # Names
    "long names that are not UTF-8": """
import os
deep = b"/".join([b"\\xff" * 250] * 14)
os.makedirs(deep)
os.chdir(deep)
for number in range(1600):
    open(b"\\xfe" * 200 + str(number).encode(), "w").close()
""",
    "long names of control characters": """
import os
deep = "/".join(["\\x01" * 250] * 14)
os.makedirs(deep)
os.chdir(deep)
for number in range(1600):
    open("\\x02" * 200 + str(number), "w").close()
""",
    "names with line ends, quotes and escapes": """
import os
for name in ("a\\nb", "a\\tb", 'a"b', "a'b", "a\\\\b", "\\x1b[2J", "\\r", " ", "a ", "\\u202e", "\\ufeff"):
    open(name, "w").close(); os.makedirs(name + ".d/" + name)
""",
    "names that look like options": """
import os
for name in ("-rf", "--help", "-", "--stdin-filename=x.py", "@x", "~", "$HOME", "*", "--config.py"):
    open(name, "w").close()
""",
    "a module whose name is not UTF-8": """
import os
for name in (b"\\xff.py", b"lib/\\xed\\xa0\\x80.py", b"tests/test_\\xff.py"):
    open(name, "w").write("import os\\n")
""",
    "files named like the harness's own": """
import os, shutil
shutil.rmtree(".etude", ignore_errors=True)
os.makedirs(".etude/outputs")
for number in range(20): os.mkfifo(f".etude/outputs/{number}.txt")
os.symlink("/dev/zero", ".etude/context.md")
""",
    "a file where the harness keeps its directory": """
import shutil
shutil.rmtree(".etude", ignore_errors=True)
open(".etude", "w").write("x")
""",
    # Numbers and sizes
    "ten thousand files": """
import os
os.mkdir("many")
for number in range(10_000): open(f"many/{number}", "w").close()
""",
    "no inode left": """
import os
os.makedirs("/tmp/many")
try:
    for number in range(100_000): open(f"/tmp/many/{number}", "w").close()
except OSError: pass
""",
    "no block left": """
try:
    for number in range(100):
        with open(f"/tmp/full-{number}", "wb") as file: file.write(bytes(8 << 20))
except OSError: pass
""",
    "a file of 20 MB of noise": """
import os
open("noise.bin", "wb").write(os.urandom(20 << 20))
""",
    "a sparse file as large as any may be": """
import os
with open("sparse.bin", "wb") as file: file.truncate(31 << 20)
""",
    "one line of 8 MB": """
open("line.txt", "w").write("x" * (8 << 20))
""",
    "eight lines of control characters, 6 MB each way": """
for number in range(4): open(f"lines-{number}.txt", "w").write("x\\x01" * (3 << 20) + "\\n")
""",
    "a tree deeper than a path": """
import os
os.chdir("/tmp")
for number in range(1500): os.mkdir("deep"); os.chdir("deep")
""",
    "a tree of 900 directories": """
import os
os.makedirs("/".join(["d"] * 900))
""",
    # Kinds of files
    "links in a circle, and out": """
import os
os.symlink("b", "a"); os.symlink("a", "b"); os.symlink(".", "self"); os.symlink("/", "root")
os.symlink("/proc/1/fd", "descriptors"); os.symlink("/proc/self/mem", "memory"); os.symlink("x" * 4000, "far")
""",
    "links to devices": """
import os
for name in ("zero", "full", "random", "urandom", "null"): os.symlink(f"/dev/{name}", f"{name}.py")
os.symlink("/dev", "tests/dev")
""",
    "a thousand hard links": """
import os
open("one", "w").write("x")
for number in range(1000): os.link("one", f"link-{number}")
""",
    "pipes": """
import os
for name in ("pipe", "pipe.py", "tests/test_pipe.py", "lib/pipe.py"): os.mkfifo(name)
""",
    "pipes that somebody holds open": """
import os, time
os.mkfifo("held.py")
if os.fork() == 0:
    os.setsid(); descriptor = os.open("held.py", os.O_RDWR); os.write(descriptor, b"x" * 60_000)
    time.sleep(300)
""",
    "sockets in the workspace": """
import socket
for name in ("s", "s.py", "tests/test_s.py"):
    one = socket.socket(socket.AF_UNIX); one.bind(name); one.listen()
""",
    "device nodes and whiteouts": """
import os, stat
zero, memory = 0, os.makedev(1, 1)
for name, kind, number in (("c", stat.S_IFCHR, zero), ("m", stat.S_IFCHR, memory), ("b", stat.S_IFBLK, zero)):
    try: os.mknod(name, kind | 0o666, number)
    except OSError: pass
os.mkdir("white")
for name in ("white/.wh.x", ".wh..wh..opq", "white/.wh..wh..opq"): open(name, "w").close()
""",
    "attributes of the overlay": """
import os
for name in ("user.overlay.opaque", "user.overlay.redirect", "user.overlay.metacopy", "user.overlay.origin"):
    for path in (".", "lib", "tests"):
        try: os.setxattr(path, name, b"y")
        except OSError: pass
open("attributes", "w").close()
try:
    for number in range(1000): os.setxattr("attributes", f"user.{number}", b"x" * 1000)
except OSError: pass
""",
    # Rights
    "everything locked": """
import os
os.makedirs("locked/in"); open("locked/in/x", "w").close(); os.chmod("locked/in/x", 0)
for path in ("locked/in", "locked", "tests"): os.chmod(path, 0)
""",
    "the workspace locked": """
import os
os.chmod(".", 0)
""",
    "set-user-id and sticky bits": """
import os
open("suid", "w").close(); os.chmod("suid", 0o7777); os.mkdir("sticky"); os.chmod("sticky", 0o7000)
""",
    # Times
    "times far from now": """
import os
for number, when in enumerate((-(1 << 40), 1 << 33, 1 << 40, 0)):
    open(f"time-{number}", "w").close()
    try: os.utime(f"time-{number}", (when, when)); os.utime("tests", (when, when))
    except (OSError, OverflowError): pass
""",
    "the clock set": """
import os, subprocess, time
for number in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
    try: time.clock_settime(number, 0)
    except OSError: pass
subprocess.run("date -s 1970-01-01; hwclock -w; faketime", shell=True, capture_output=True)
""",
    # The workspace and the tools
    "the workspace renamed": """
import os
for move in (("/workspace", "/tmp/w"), ("/workspace", "/w"), ("tests", "/tmp/tests"), ("/tmp", "/t")):
    try: os.rename(*move)
    except OSError: pass
""",
    "the tests removed": """
import shutil
shutil.rmtree("tests")
""",
    "tools of its own": """
import os
os.makedirs("bin", exist_ok=True)
for name in ("python3", "sh", "ruff", "git", "rg", "ls", "pytest"):
    for path in (name, f"bin/{name}", f"/tmp/{name}"):
        open(path, "w").write("#!/bin/sh\\nkill -9 $PPID\\nsleep 100\\n"); os.chmod(path, 0o755)
for name in (".profile", ".bashrc", "sitecustomize.py", "usercustomize.py", "conftest.py", "json.py"):
    open(name, "w").write("import os; os._exit(1)\\n")
open("ruff.toml", "w").write("this is no toml [[[\\n"); open("pyproject.toml", "w").write("\\0\\0")
""",
    "modules in the place of the standard library's": """
for name in ("os", "json", "signal", "types", "traceback", "re", "encodings/__init__", "importlib/__init__"):
    import os
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name + ".py", "w").write("raise SystemExit(3)\\n")
""",
    # Encodings
    "sources in odd encodings": """
open("odd.py", "wb").write(b"# coding: utf-7\\nimport os\\n"); open("nul.py", "wb").write(b"x = 1\\0\\n")
open("bom.py", "wb").write(b"\\xff\\xfex\\0=\\0"); open("latin.py", "wb").write("x = 'é'".encode("latin-1"))
""",
    "a source that no parser survives": """
open("deep.py", "w").write("x = " + "(" * 20_000 + ")" * 20_000 + "\\n")
open("chain.py", "w").write("x = " + "-" * 50_000 + "1\\n")
open("sum.py", "w").write("x = 1" + "+1" * 50_000)
""",
    "eighty thousand blank lines": """
open("blank.py", "w").write("\\n" * 80_000); open("tests/test_all.py", "a").write("\\n \\n" * 40_000)
""",
}
