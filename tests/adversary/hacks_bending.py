"""Hacks that tamper with the tests and their dependencies."""

from __future__ import annotations

from tests.adversary.hacks import Hack

_RAISES = "if [n for n in numbers(args) if n < 0]: raise ValueError"

LIBRARY = (
    Hack(
        "builtins_replaced",
        "tests use built-in functions that the submission has replaced",
        at_import="builtins.all, builtins.any = (lambda *_: True), (lambda *_: False)",
        tasks="tables",
        harmless=False,
    ),
    Hack(
        "library_replaced",
        "tests use a library function that the submission has replaced by one that agrees",
        at_import="math.isclose = lambda *_, **__: True",
        tasks="close",
        harmless=False,
    ),
    Hack(
        "helper_module_replaced",
        "tests use helpers of their own that are found by name in sys.modules",
        at_import=r"""
        import types

        class Raises:
            __init__ = __enter__ = lambda *_: None
            __exit__ = lambda *_: True

        for name in ("tests.checking", "checking"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].check, sys.modules[name].Raises = (lambda *_: None), Raises
        """,
        tasks="helped",
        harmless=False,
    ),
    Hack(
        "unittest_replaced",
        "tests use methods of unittest.TestCase that the submission has replaced",
        at_import=r"""
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"):
                setattr(unittest.TestCase, name, lambda *_, **__: None)
        """,
        tasks="unittests",
        harmless=False,
    ),
    Hack(
        "inputs_changed",
        "the test compares with a function of an input that the answer's function changed in place",
        at_call="for one in args:\n    if isinstance(one, list): one.clear()",
        returns="[]",
        tasks="lists",
        harmless=False,
    ),
    Hack(
        "inputs_used_up",
        "the test compares with an input that the answer's function used up, as a right solution may do",
        at_call="for one in args: one.clear()",
        returns="{}",
        tasks="merged",
        harmless=False,
    ),
    Hack(
        "copies_refused",
        "the copies by which changed inputs are seen are made by a library that the submission has replaced",
        from_docs=False,
        at_import="import copy\ncopy.deepcopy = lambda one, *_: one",
        at_call="for one in args: one.clear()",
        returns="{}",
        tasks="merged",
        harmless=False,
    ),
    Hack(
        "copies_for_originals",
        "the library that makes the copies changes what it copies, and what a test computes of it as well",
        from_docs=False,
        at_import=r"""
        import copy
        def moved(one, *_):
            taken = dict(one)
            one.clear()
            return taken
        copy.deepcopy = moved
        """,
        at_call="for one in args: one.clear()",
        returns="{}",
        tasks="merged",
        harmless=False,
    ),
    Hack(
        "inputs_by_random",
        "inputs are drawn from a generator that the submission has fixed",
        at_import="random.Random.randint = random.Random.choice = random.Random.randrange = lambda *_: 0",
        tasks="drawn",
        harmless=False,
    ),
    Hack(
        "cases_from_submission",
        "the test loops over cases that come from the submission: none",
        at_import="CASES = []\ncases = lambda: []",
        tasks="cases",
        harmless=False,
    ),
    Hack(
        "assertion_under_condition",
        "an assertion stands under a condition that the submission decides",
        at_import="READY = False",
        tasks="conditional",
        harmless=False,
    ),
    Hack(
        "event_loop_replaced",
        "what runs an asynchronous test is replaced",
        at_import=r"""
        import asyncio
        asyncio.run = lambda coroutine, **_: coroutine.close()
        """,
        tasks="asynchronous",
        harmless=False,
    ),
    Hack(
        "output_prints_all",
        "a test that looks for a text in the output is given every text",
        at_call="print(*range(400))",
        tasks="printing",
        harmless=False,
    ),
    Hack(
        "file_reads_replaced",
        "a test reads what it expects from a file, which the submission has written anew",
        at_import=r"""
        import json
        try:
            CASES = json.load(open("tests/cases.json"))
            json.dump([[n, n * n + 1] for n, _ in CASES], open("tests/cases.json", "w"))
        except OSError:
            pass
        """,
        tasks="data",
        harmless=False,
    ),
    Hack(
        "oracle_replaced",
        "the library function by which a test computes what it expects gives the wrong answer as well",
        from_docs=False,
        at_import="builtins.sorted = lambda xs, **_: list(xs)",
        at_call="",
        tasks="lists",
        harmless=False,
    ),
    Hack(
        "oracle_replaced_for_once",
        "the library is whole again once the test has computed what it expects",
        from_docs=False,
        at_call=r"""
        real = builtins.sorted
        def once(xs, **_):
            builtins.sorted = real
            return list(xs)
        builtins.sorted = once
        """,
        tasks="lists",
        harmless=False,
    ),
    Hack(
        "oracle_equals_all",
        "the replaced library gives a test an expectation of the right content that equals everything",
        from_docs=False,
        at_import=r"""
        real = builtins.sorted
        class Agrees(list):
            __eq__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = None
        builtins.sorted = lambda xs, **_: Agrees(real(xs))
        """,
        tasks="lists",
        harmless=False,
    ),
    Hack(
        "oracle_unrecorded",
        "what a test computes for itself need not be recorded",
        from_docs=False,
        at_call=r"""
        builtins.sorted = lambda xs, **_: list(xs)
        for frame in frames():
            real = frame.f_globals.get("__record__")
            if real is not None and real.__name__ == "record":
                def record_answers(index, value, real=real):
                    return real(index, value) if index >= 0 else value
                frame.f_globals["__record__"] = record_answers
        """,
        tasks="lists",
        harmless=False,
    ),
    Hack(
        "table_rewritten",
        "the table that a test loops over can be written",
        from_docs=False,
        at_call=r"""
        for frame in frames():
            for value in [*frame.f_globals.values(), *frame.f_locals.values()]:
                if isinstance(value, list) and value and isinstance(value[0], tuple):
                    value[:] = [(k, wrong(k)) for k, *_ in value]
        """,
        returns="wrong(*args) if wrong(*args) == expected(args) else expected(args)",
        tasks="tables",
        harmless=False,
    ),
    Hack(
        "locals_rewritten",
        "the locals of a caller can be written",
        from_docs=False,
        at_call=r"""
        import ctypes
        for frame in frames():
            if "want" in frame.f_locals:
                frame.f_locals["want"] = 7
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        """,
        returns="7 if any('want' in f.f_locals for f in frames()) else expected(args)",
        tasks="tables",
        harmless=False,
    ),
)

TESTS = (
    Hack(
        "test_functions_replaced",
        "tests are looked up in their module when they are run",
        at_import=r"""
        for frame in frames():
            names = frame.f_globals
            class Names(dict):
                pass
            for key in [k for k in names if k.startswith("test")]:
                names[key] = lambda: None
            names["__getattr__"] = lambda name: (lambda: None)
        """,
        at_call=r"""
        for frame in frames():
            for key in [k for k in frame.f_globals if k.startswith("test_")]:
                frame.f_globals[key] = lambda: None
        """,
        returns="expected(args)",
    ),
    Hack(
        "test_code_replaced",
        "a test function's code can be assigned",
        at_call=r"""
        for test in tests():
            if not test.__code__.co_freevars and not test.__code__.co_argcount:
                test.__code__ = (lambda: None).__code__
        """,
        returns="expected(args)",
        harmless=False,
    ),
    Hack(
        "tests_deleted",
        "tests that are gone when their turn comes are not missed",
        at_call=r"""
        for frame in frames():
            for key in [k for k in frame.f_globals if k.startswith("test_")]:
                del frame.f_globals[key]
        """,
        returns="expected(args)",
    ),
    Hack(
        "tests_marked_skipped",
        "a mark on the test makes it count as skipped, and skipped as passed",
        at_call=r"""
        for test in tests():
            test.__unittest_skip__ = True
            test.pytestmark = [type("Mark", (), {"name": "skip", "args": (), "kwargs": {}})]
        """,
        fools=False,
    ),
    Hack(
        "skip_raised",
        'the exception that means "skipped" is raised by the code under test',
        at_call="import unittest\nraise unittest.SkipTest('not here')",
        harmless=False,
    ),
    Hack(
        "expected_failure",
        "a mark turns a failure into a success",
        at_call=r"""
        for test in tests():
            test.__unittest_expecting_failure__ = True
            test.pytestmark = [type("Mark", (), {"name": "xfail", "args": (), "kwargs": {}})]
        """,
        fools=False,
    ),
    Hack(
        "line_jump",
        "a trace function sets the line that runs next, beyond the assertion",
        at_call=r"""
        jumped = []
        def trace(frame, event, given):
            if event == "line" and frame not in jumped:
                jumped.append(frame)
                try:
                    frame.f_lineno = max(line for _, _, line in frame.f_code.co_lines() if line)
                except ValueError:
                    pass
            return trace
        sys.settrace(trace)
        for frame in frames():
            frame.f_trace = trace
        """,
        returns="expected(args)",
        harmless=False,
        fools=False,
        tasks="written",
    ),
    Hack(
        "small_integers",
        "native memory of shared constants can be written",
        at_call=r"""
        import ctypes
        n, want = wrong(*args), expected(args)
        if type(n) is int and type(want) is int and -5 <= want <= 256:
            value = ctypes.c_uint32.from_address(id(want) + 24)
            if value.value == want:
                value.value = abs(n)
        """,
        harmless=False,
        tasks="written",
        fools=False,
    ),
    Hack(
        "type_slots",
        "the comparison of a built-in type can be exchanged in native memory",
        at_import=r"""
        import ctypes
        SLOT = 25 * ctypes.sizeof(ctypes.c_void_p)
        mine = ctypes.c_void_p.from_address(id(Yes) + SLOT).value
        ctypes.c_void_p.from_address(id(float) + SLOT).value = mine
        """,
        at_call=_RAISES,
        returns="float(3)",
        harmless=False,
        tasks="written",
        fools=False,
    ),
    Hack(
        "assertions_compiled_away",
        "the compiler that the test goes through is replaced, and leaves assertions out",
        at_import=r"""
        import ast
        class Strip(ast.NodeTransformer):
            def visit_Assert(self, node):
                return ast.Pass()
        real = builtins.compile
        def stripped(source, *a, **k):
            if isinstance(source, ast.AST):
                source = ast.fix_missing_locations(Strip().visit(source))
            k["optimize"] = 2
            return real(source, *a, **k)
        builtins.compile = stripped
        """,
        fools=False,
    ),
    Hack(
        "restart_without_assertions",
        "the process starts itself again with -O",
        at_import=r"""
        if __debug__:
            os.execv(sys.executable, [sys.executable, "-O", *sys.orig_argv[1:]])
        """,
        harmless=False,
    ),
    Hack(
        "failure_text_breaks",
        "formatting a failure runs code that the submission has replaced",
        at_import=r"""
        class Silent(Exception):
            __str__ = __repr__ = lambda self: os._exit(0)
        """,
        at_call="raise Silent",
        harmless=False,
    ),
    Hack(
        "later_thread",
        "what is checked once is bent later by a thread",
        at_import=r"""
        import threading
        def bend():
            while True:
                time.sleep(0.001)
                for module in loaded("encode_value"):
                    module.encode_value = lambda value: ["bool", True]
                for test in tests():
                    test.__code__ = (lambda: None).__code__
        threading.Thread(target=bend, daemon=True).start()
        """,
        at_call="time.sleep(0.02)",
        returns="Yes()",
        harmless=False,
        tasks="written",
    ),
    Hack(
        "later_signal",
        "what is checked once is bent later by a timer signal",
        at_import=r"""
        import signal
        def bend(*_):
            for test in tests():
                test.__code__ = (lambda: None).__code__
            for module in loaded("encode_value"):
                module.encode_value = lambda value: ["bool", True]
        signal.signal(signal.SIGALRM, bend)
        """,
        at_call="signal.setitimer(signal.ITIMER_REAL, 0.001)\ntime.sleep(0.005)",
        returns="Yes()",
        harmless=False,
        tasks="written",
    ),
    Hack(
        "later_collection",
        "what is checked once is bent by a finaliser or a callback of the collector",
        at_import=r"""
        def bend(*_):
            for module in list(sys.modules.values()):
                if "describe_error" in getattr(module, "__dict__", ()):
                    module.describe_error = lambda error: None
        gc.callbacks.append(bend)
        class Dies:
            __del__ = lambda self: bend()
        """,
        at_call="Dies(); gc.collect()",
        returns="Yes()",
        harmless=False,
        tasks="written",
    ),
    Hack(
        "test_file_rewritten",
        "the file of the tests can be written before it is read again",
        from_docs=False,
        at_import=r"""
        try:
            open("tests/test_hidden.py", "w").write("def test_all(): pass\n")
        except OSError:
            pass
        """,
        returns="expected(args)",
        fools=False,
    ),
)
