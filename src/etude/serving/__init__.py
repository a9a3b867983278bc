"""What every HTTP server of ours shares: who may ask, errors, bodies, measurement, the process.

Read `application` first, then `access` and `process`. `access`, `metrics` and `listening` need no web
framework: the parts that have their own tokens and counters import them.
"""
