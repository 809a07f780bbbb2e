"""In place of `python -m unisono.task`: the disk gives back another byte than it was given, of the checkpoint that is to be read back."""

import json
import os
import sys
from pathlib import Path

if sys.argv[1] == "rehearsed":
    path = Path(json.loads(Path(sys.argv[2]).read_text())["path"]) / "trainable.safetensors"
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 0x10]))
os.execv(sys.executable, [sys.executable, "-m", "unisono.task", *sys.argv[1:]])
