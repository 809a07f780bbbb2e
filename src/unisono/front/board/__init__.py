"""Shows runs in a browser, live or as one file.

It reads what a run writes, and can neither change nor stop it.
"""
