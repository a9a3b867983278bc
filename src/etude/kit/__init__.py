"""Utilities shared by all packages. They depend only on the standard library and `etude.errors`.

`durable`: atomic, synced writes of files and directories. `leftovers`: scratch directories of killed
processes. `journal`: an append-only log of checksummed lines. `retry`: retries with exponential backoff.
`git`: the git command line. `secrets`: tokens from private files and variables. `syntax`: Python syntax
trees. `tasks`: asyncio background tasks. `threads`: parallel work in order. `toml`: writing TOML.
"""
