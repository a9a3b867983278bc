"""Egress of a sandbox: an allow-list, a proxy that checks every request against it, and a request log.

A sandbox's network namespace has only a loopback interface. Connections of its programs to the proxy's port
there arrive outside as byte streams (`streams.Stream`), which `proxy.EgressProxy` serves.
"""
