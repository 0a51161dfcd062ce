"""Compares the pixels of NAME.png with the bytes of NAME.raw, for each NAME."""
import pathlib
import sys

from PIL import Image

for name in sys.argv[1:]:
    image = Image.open(name + ".png")
    image.load()
    assert image.tobytes() == pathlib.Path(name + ".raw").read_bytes(), (name, image)
