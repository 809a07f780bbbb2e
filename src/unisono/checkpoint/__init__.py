"""Checkpoints: directories that appear whole, say what is in them, and are read back only after they were verified.

`manifest`, `signing`, `store` and `resume` are light and serve the front, too; `state` needs torch and is the worker's.
"""
