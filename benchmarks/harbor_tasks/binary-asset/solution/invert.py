import gzip
from pathlib import Path

data = gzip.decompress(Path("picture.bin.gz").read_bytes())
Path("inverted.bin").write_bytes(bytes(255 - byte for byte in data))
