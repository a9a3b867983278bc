"""The escape suite: what a hostile program inside a sandbox tries, and what stops it.

`attempts.py` is the table. Each attempt runs on every backend, as root and as a plain user, and must fail;
each has a control in which its protections are taken away and it succeeds. `holes.py` lists what does not
hold yet. `python -m tests.adversary.escape.document` writes `docs/escape.md`.
"""
