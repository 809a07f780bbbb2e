"""Turns files into token tables in which every row of every source is accounted for.

Nothing is imported here: `data.token_table` and `data.token_table` need numpy and pyarrow alone, so that a second start is quick.
"""
