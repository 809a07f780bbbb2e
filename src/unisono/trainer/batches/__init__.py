"""Where the rows of each step come from, as the loop sees it: the micro batches of a source, of
which a token table is one.
"""
