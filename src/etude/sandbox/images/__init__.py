"""Root file systems for sandboxes: layers, named images, and the ways to come by them."""
