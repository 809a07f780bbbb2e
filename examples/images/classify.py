"""Says of how many pictures in a folder each class of shapes has the color: python examples/images/classify.py FOLDER."""

import sys
from collections import Counter
from pathlib import Path

from make_shapes import color_of
from PIL import Image

if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.png"))
    counts = Counter(color_of(Image.open(file)) for file in files)
    print(", ".join(f"{name}: {count} of {len(files)}" for name, count in counts.most_common()))
