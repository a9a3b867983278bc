"""What every HTTP server and client of ours shares: who may ask, errors, bodies, measurement, the process.

Read `application` first, then `access`, `process` and `long_answers`; `client` is the other side. `access`,
`errors`, `messages`, `metrics`, `listening` and `client` need no web framework: the parts that have their own
tokens and counters import them, and so do those who ask a server.
"""
