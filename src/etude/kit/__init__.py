"""Small mechanisms that every part needs, each in one place. It imports the standard library and the errors.

`durable`: files and folders that are there whole or not at all. `leftovers`: what a killed process leaves
behind. `journal`: checksummed lines. `retry`: trying again with pauses that grow. `git`: what git prints.
`secrets`: what only its owner may read. `syntax`: trees of Python's. `tasks`: work that goes on beside its
caller. `toml`: values as text.
"""
