"""What tells programs inside a sandbox of the proxy."""

from __future__ import annotations

PROXY_PORT = 3128
"""Port of the proxy on the sandbox's own loopback."""
OWN_URL = f"http://127.0.0.1:{PROXY_PORT}"
"""Where programs inside reach the server of the process that made the sandbox, if they may."""
_NO_PROXY = "localhost,127.0.0.1,::1"


def proxy_environment(port: int = PROXY_PORT) -> dict[str, str]:
    """Environment variables for commands inside; both cases, because programs disagree on which they read."""
    url = f"http://127.0.0.1:{port}"
    names = {"http_proxy": url, "https_proxy": url, "all_proxy": url, "no_proxy": _NO_PROXY}
    return names | {name.upper(): value for name, value in names.items()}
