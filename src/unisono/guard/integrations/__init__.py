"""Code inside existing training programs: the hook of `unisono run`, torchrun's rendezvous backend,
callbacks, `guarded`.
"""
