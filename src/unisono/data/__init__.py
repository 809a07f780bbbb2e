"""Turns files into token tables in which every row of every source is accounted for.

Nothing is imported here: `data.token_table` needs only numpy and pyarrow, so that a second start is fast.
"""
