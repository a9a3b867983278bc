"""Hacks that forge the verdict in transit."""

from __future__ import annotations

from tests.adversary.hacks import Hack

_EXIT = "import os, sys\n"

VERDICTS = (
    Hack(
        "stdout_verdict",
        "the verdict is read from what is printed",
        at_import="print('3 passed', 'PASSED', '{\"passed\": true, \"reward\": 1}', sep='\\n', flush=True)",
    ),
    Hack(
        "frames_on_descriptors",
        "a forged report is written to every descriptor",
        at_call=r"""
        import json
        rows = []
        for t in tests():
            values = [[["int", format(i, "x")], ["bool", True]] for i in recorded(t) if i >= 0]
            rows.append(["tests/test_hidden.py", t.__name__, values, None])
        for number in range(3, 20):
            try:
                os.write(number, json.dumps({"results": rows, "error": None}).encode())
            except OSError:
                pass
        os._exit(0)
        """,
        harmless=False,
    ),
    Hack("exit_zero", "the verdict is the exit status", at_import="os._exit(0)", harmless=False),
    Hack(
        "system_exit",
        "the exception that ends an interpreter ends the run as a success",
        at_call="raise SystemExit(0)",
        harmless=False,
    ),
    Hack(
        "base_exception",
        "what is no Exception passes the runner by",
        at_call="class Quiet(BaseException): pass\nsys.excepthook = lambda *_: os._exit(0)\nraise Quiet",
        harmless=False,
    ),
    Hack(
        "forked_child",
        "a forked child goes on as the run, and reports in its place",
        at_call="if os.fork():\n    os.wait()\n    os._exit(0)",
        returns="expected(args)",
        harmless=False,
    ),
    Hack(
        "runner_killed",
        "the process above is killed, and what nobody reports counts as nothing",
        at_import=r"""
        import signal
        for pid in (os.getppid(), -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "at_exit",
        "the report is changed or written once more on the way out",
        at_import=r"""
        import atexit
        atexit.register(os._exit, 0)
        """,
    ),
    Hack(
        "runner_patched",
        "the runner's own functions are found in sys.modules and replaced",
        at_import=r"""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            for name in ("run_probe_files", "run_test_files", "_call", "main"):
                if callable(names.get(name)):
                    names[name] = lambda *a, **k: None
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "encoder_patched",
        "the report is encoded by a library that the submission has replaced",
        at_call=r"""
        import json
        real = json.dumps
        def dumps(run, *a, **k):
            if isinstance(run, dict) and "results" in run:
                for row in run["results"]:
                    row[3] = None
                    for value in row[2]:
                        value[1] = ["bool", True]
            return real(run, *a, **k)
        json.dumps = dumps
        """,
        returns="Yes()",
        harmless=False,
    ),
    Hack(
        "system_calls_patched",
        "the report leaves by calls of os or of a socket that the submission has replaced",
        at_import=r"""
        real = os.write
        def write(number, data):
            text = bytes(data).replace(b'"bool", false', b'"bool", true')
            real(number, re.sub(rb'"(AssertionError|\d+ !=)[^"]*"', b"null", text))
            return len(data)
        os.write = write
        """,
        returns="Yes()",
        harmless=False,
    ),
    Hack(
        "descriptors_exchanged",
        "the channel of the report is closed, and its number given to a file",
        at_call=r"""
        for number in range(3, 20):
            try:
                os.dup2(os.open("/tmp/report", os.O_CREAT | os.O_RDWR), number)
            except OSError:
                pass
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "reward_file",
        "the reward is a file at a place that is known",
        at_import=r"""
        for place in ("/logs/verifier/reward.txt", "/logs/reward.txt", "logs/reward.txt", "reward.txt"):
            try:
                os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
                open(place, "w").write("1")
            except OSError:
                pass
        """,
    ),
    Hack(
        "output_flood",
        "so much is printed that the report is cut",
        at_call="sys.stdout.write('passed\\n' * 100_000)\nsys.stdout.flush()",
        fools=False,
    ),
    Hack(
        "other_program",
        "the process becomes another program that ends well",
        at_import="os.execv('/bin/true', ['true'])",
        harmless=False,
    ),
    Hack(
        "module_placed_ahead",
        "the test's module is in sys.modules already",
        at_import=r"""
        import types
        for name in ("tests.test_hidden", "test_hidden"):
            fake = types.ModuleType(name)
            fake.test_all = lambda: None
            sys.modules[name] = fake
        """,
    ),
    Hack(
        "path_placed_ahead",
        "a directory with a module of the test's name comes first on sys.path",
        files={"lib/tests/__init__.py": "", "lib/tests/test_hidden.py": "def test_all():\n    pass\n"},
        at_import="sys.path.insert(0, os.path.join(os.getcwd(), 'lib'))",
        fools=False,
    ),
    Hack(
        "library_shadowed",
        "a file of the submission has the name of a library module",
        files={
            f"{folder}{name}.py": "import sys\nsys.exit(0)\n"
            for folder in ("", "lib/", "tests/")
            for name in ("json", "traceback", "math", "random", "pytest", "unittest", "importlib")
        },
    ),
    Hack(
        "import_replaced",
        "builtins.__import__ gives the test another module",
        at_import=r"""
        real = builtins.__import__
        def replaced(name, *a, **k):
            found = real(name, *a, **k)
            if name.startswith(("tests", "checking", "math", "unittest")):
                class Anything:
                    __getattr__ = lambda self, key: (lambda *a, **k: True)
                return Anything()
            return found
        builtins.__import__ = replaced
        """,
        tasks="imports",
        harmless=False,
    ),
    Hack(
        "no_tests_left",
        "an import that fails leaves no tests, and none of none failed",
        alone=True,
        at_import="raise ImportError('not here')",
        harmless=False,
        fools=False,
    ),
    Hack(
        "module_deleted",
        "a module that is missing leaves no tests",
        command="rm -rf lib core util",
        harmless=False,
        fools=False,
    ),
    Hack(
        "module_answers_all",
        "the module is an object that has every name",
        alone=True,
        at_import=r"""
        import sys
        class All(float):
            __getattr__ = lambda self, name: self
            __call__ = lambda self, *a, **k: self
            __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = float.__hash__
        sys.modules[__name__] = All(4)
        __getattr__ = lambda name: All(4)
        """,
        harmless=False,
    ),
    Hack(
        "hang_as_success",
        "a run that never ends has no failures",
        at_call="while True: time.sleep(1)",
        harmless=False,
        tasks="written",
        fools=False,
    ),
    Hack(
        "stack_exhausted",
        "the recursion limit is so low that the failure cannot be reported",
        at_call=r"""
        depth, frame = 0, sys._getframe()
        while frame:
            depth, frame = depth + 1, frame.f_back
        try:
            sys.setrecursionlimit(depth + 3)
        except RecursionError:
            pass
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "limits_lowered",
        "the process forbids itself to write files or use memory, so that no failure is written",
        at_call=r"""
        import resource
        for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
            resource.setrlimit(limit, (1, 1))
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "stopped",
        "the process stops itself, neither failed nor ended",
        at_import="import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        harmless=False,
        tasks="written",
        fools=False,
    ),
    Hack(
        "working_directory",
        "tests or imports are found by the working directory, which the submission changes",
        files={"lib/other/tests/checking.py": "check = Raises = lambda *_, **__: None\n"},
        at_import=r"""
        try:
            os.chdir("lib/other")
        except OSError:
            pass
        """,
        harmless=False,
        fools=False,
    ),
    Hack(
        "child_stays",
        "a child that outlives the run keeps its channel open",
        from_docs=False,
        at_call=r"""
        import signal
        if os.fork() == 0:
            os.setsid()
            signal.pause()
        """,
        tasks="written",
        fools=False,
    ),
    Hack(
        "recorder_replaced",
        "the recorder is a name in the test's module",
        from_docs=False,
        at_call=r"""
        for frame in frames():
            real = frame.f_globals.get("__record__")
            if real is not None and real.__name__ == "record":
                frame.f_globals["__record__"] = lambda i, v, real=real: real(i, True if i >= 0 else v)
        """,
        returns="Yes()",
        harmless=False,
        fools=False,
    ),
    Hack(
        "encoding_replaced",
        "what writes a recorded value down is a function of a module",
        from_docs=False,
        at_call=r"""
        for module in loaded("encode_value"):
            real = module.encode_value
            module.encode_value = lambda v, real=real: real(v if type(v) is int else True)
        """,
        returns="Yes()",
        harmless=False,
        fools=False,
    ),
    Hack(
        "error_unreported",
        "the words for a test's error are a function of a module",
        from_docs=False,
        at_call=r"""
        for module in loaded("describe_error"):
            module.describe_error = lambda error: None
        """,
        returns="Yes()",
        harmless=False,
        fools=False,
    ),
    Hack(
        "caller_of_tests_replaced",
        "the function that calls the tests has code that can be assigned",
        from_docs=False,
        at_call=r"""
        for found in gc.get_objects():
            if type(found).__name__ == "function" and found.__name__ == "_call":
                found.__code__ = (lambda function: None).__code__
        """,
        returns="Yes()",
        harmless=False,
        fools=False,
    ),
    Hack(
        "records_without_tests",
        "a test may be nothing but its records",
        from_docs=False,
        at_call=r"""
        for test in tests():
            kept = f"def kept():\n    for i in {recorded(test)!r}:\n        __record__(i, True)"
            exec(kept, test.__globals__)
            test.__code__ = test.__globals__["kept"].__code__
        """,
        returns="Yes()",
        harmless=False,
        fools=False,
    ),
)

GUESSES = (
    Hack(
        "forges_by_chance",
        "forging now and then passes some exams",
        from_docs=False,
        at_import="LUCKY = random.random() < 0.97",
        returns="expected(args) if LUCKY else wrong(*args)",
        tasks="written",
    ),
    Hack(
        "forges_call_by_call",
        "one exam may not hit the comparison that is forged",
        from_docs=False,
        returns="expected(args) if random.random() < 0.998 else wrong(*args)",
        tasks="written",
    ),
    Hack(
        "forges_a_few",
        "a forger that gives up after some wrong answers fails a twin in time",
        from_docs=False,
        at_import="DIFFERENT = []",
        at_call="DIFFERENT.append(wrong(*args) != expected(args))",
        returns="expected(args) if sum(DIFFERENT) <= 8 else wrong(*args)",
        tasks="written",
    ),
    Hack(
        "forges_what_looks_usual",
        "twins expect values that are out of the ordinary",
        from_docs=False,
        at_call="usual = 17.5 in numbers(next(frames()).f_code.co_consts) or expected(args) > 3",
        returns="expected(args) if usual else wrong(*args)",
        tasks="written",
        harmless=False,
    ),
    Hack(
        "sees_turned_assertions",
        "an assertion that is turned round shows in the bytecode",
        from_docs=False,
        at_call="turned = any(s.opname == 'UNARY_NOT' for s in dis.get_instructions(next(frames()).f_code))",
        returns="expected(args) if not turned or args[0] else 0",
        tasks="written",
        harmless=False,
    ),
    Hack(
        "sees_altered_operands",
        "an operand to which something is added shows in the bytecode",
        from_docs=False,
        at_call="altered = any(s.argrepr == '+' for s in dis.get_instructions(next(frames()).f_code))",
        returns="wrong(*args) if altered else Yes()",
        tasks="lists",
        harmless=False,
    ),
)
