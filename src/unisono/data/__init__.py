"""Turns files into token tables, and accounts for every row of every source.

Nothing is imported here: `data.token_table` needs only numpy and pyarrow, so that a second start is fast.
"""
