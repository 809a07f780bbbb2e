"""Checkpoints: directories that are published complete, list their contents, and are verified
before they are read.

`state` needs torch and belongs to the worker; all other modules are torch-free and serve the front,
too.
"""
