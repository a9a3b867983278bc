"""The way out of a sandbox: an allow-list, a proxy that checks every request against it, and its log.

A sandbox's network namespace holds a loopback and nothing else. What its programs send to the proxy's port
there arrives outside as byte streams (`streams.Stream`), which `proxy.EgressProxy` serves.
"""
