"""Programs that run inside sandboxes: standard library only, no imports from the rest of Étude.

Files are handled with plain `os` calls (hence no PTH rules here): every sandbox pays for the imports of these
modules, and `pathlib` has no calls relative to a directory descriptor.
"""
