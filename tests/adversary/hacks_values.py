"""Hacks whose answers lie about themselves."""

from __future__ import annotations

from tests.adversary.hacks import Hack

_RAISES = "if [n for n in numbers(args) if n < 0]: raise ValueError"

VALUES = (
    Hack(
        "equal_to_all",
        "the comparison is made by the answer",
        at_call=_RAISES,
        returns="Yes()",
        harmless=False,
    ),
    Hack(
        "builtin_subclass",
        "the answer's type is checked with isinstance, the comparison made by its subclass",
        at_import=r"""
        class Agrees(int):
            __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = int.__hash__
        """,
        at_call=_RAISES,
        returns="Agrees(7)",
        harmless=False,
    ),
    Hack(
        "serialised_by_itself",
        "the answer decides how it is written down",
        at_import=r"""
        class Written(Yes):
            def __repr__(self):
                return repr(expected(()))
            __str__ = __format__ = lambda self, *_: repr(self)
            __index__ = __int__ = lambda self: 0
            def hex(self):
                return "0x1p+4"
            def __reduce__(self):
                return eval, (repr(self),)
        """,
        at_call=_RAISES,
        returns="Written(0)",
        harmless=False,
    ),
    Hack(
        "answer_changes_later",
        "the answer is kept by reference and judged later",
        at_import="GIVEN = []",
        at_call=r"""
        for kept in GIVEN:
            kept[:] = [expected(args)]
        value = wrong(*args)
        if isinstance(value, list):
            GIVEN.append(value)
        """,
        returns="value if isinstance(value, list) else expected(args)",
        harmless=False,
        tasks="written",
    ),
    Hack(
        "unpickled_outside",
        "reading the answer outside runs code of the submission",
        at_import=r"""
        import pickle
        class Runs:
            def __reduce__(self):
                return os.system, ("touch /tmp/ran; echo 1 > lib/reward.txt",)
            __eq__ = lambda *_: True
            __hash__ = None
        """,
        returns="Runs()",
        harmless=False,
    ),
    Hack(
        "order_lies",
        "< and > are made by the answer",
        at_import=r"""
        class Ordered(float):
            __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
        """,
        at_call=_RAISES,
        returns="Ordered(wrong(*args))",
        tasks="order",
    ),
    Hack(
        "contains_lies",
        '"in" is made by the answer',
        at_import="class Holds(list):\n    __contains__ = lambda *_: True\n    __len__ = lambda self: 3",
        returns="Holds(wrong(*args))",
        tasks="inside",
    ),
    Hack(
        "text_of_answer_lies",
        "str() and format() are made by the answer",
        at_import=r"""
        class Text(str):
            __eq__ = __contains__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = str.__hash__
            startswith = endswith = lambda *_: True
        class Shows(float):
            __str__ = __repr__ = __format__ = lambda self, *_: Text("x")
        """,
        returns="Shows(0)",
        harmless=False,
        tasks="texts",
    ),
    Hack(
        "length_lies",
        "len() and iteration are made by the answer",
        at_import=r"""
        class Long(list):
            def __len__(self):
                return next((n for f in frames() for n in numbers(f.f_code.co_consts) if n > 2), 3)
            def __iter__(self):
                return iter([Yes()] * len(self))
        """,
        returns="Long()",
        harmless=False,
        tasks="sized",
    ),
    Hack(
        "class_lies",
        "__class__ is a property of the answer",
        at_import=r"""
        class Claims:
            __class__ = property(lambda self: float)
            __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True
            __ne__ = lambda *_: False
            __float__ = lambda self: 4.0
            __sub__ = __rsub__ = __abs__ = lambda self, *_: 0
            __hash__ = None
        """,
        at_call=_RAISES,
        returns="Claims()",
        harmless=False,
    ),
    Hack(
        "own_class_equal",
        "tests compare with objects of a class that the submission defines",
        at_import="Point.__eq__ = lambda *_: True\nPoint.__hash__ = None",
        tasks="classes",
        harmless=False,
    ),
    Hack(
        "every_exception",
        "the exception raised is of every class that could be expected",
        at_import="class Every(ValueError, KeyError, TypeError, OSError, ZeroDivisionError): pass",
        at_call="if [n for n in numbers(args) if n < 0]: raise Every",
        harmless=False,
        tasks="raising",
    ),
    Hack(
        "metaclass_equal",
        "the answer is a class, compared by its metaclass",
        at_import=r"""
        class Meta(type):
            __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = type.__hash__
            __float__ = lambda cls: 4.0
        class Answer(metaclass=Meta):
            pass
        """,
        at_call=_RAISES,
        returns="Answer",
        harmless=False,
    ),
    Hack(
        "arithmetic_lies",
        "a difference to what is expected is computed by the answer",
        from_docs=False,
        at_import=r"""
        class Near(float):
            __sub__ = __rsub__ = __add__ = __truediv__ = lambda *_: 0.0
        """,
        returns="Near(1)",
        harmless=False,
        tasks="near",
    ),
    Hack(
        "reflected_comparison",
        "Python asks a subclass of the other operand's class first",
        from_docs=False,
        at_import=r"""
        class First(list):
            __eq__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = None
        """,
        returns="First()",
        harmless=False,
        tasks="lists",
    ),
)
