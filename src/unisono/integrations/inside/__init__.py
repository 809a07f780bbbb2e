"""What runs inside the ranks of somebody else's program under `unisono run`: the program is unchanged, and only Python's start is.

`path/sitecustomize.py` is found because its folder leads PYTHONPATH. It hooks the import of some modules of torch, and each of them, once it
is loaded, is given to the module here that `HOOKS` there names. Nothing here imports torch: the program does.
"""
