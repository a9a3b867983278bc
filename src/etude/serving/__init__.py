"""Shared code of all HTTP servers and clients: authentication, errors, bodies, metrics, the server process.

Read `application` first, then `access`, `process` and `long_answers`; `client` is the client side. `access`,
`errors`, `messages`, `metrics`, `listening` and `client` need no web framework, so clients and the packages
with their own tokens and counters can import them.
"""
