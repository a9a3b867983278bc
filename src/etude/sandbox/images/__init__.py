"""Root file systems for sandboxes: layers, named images, and how to import and build them."""
