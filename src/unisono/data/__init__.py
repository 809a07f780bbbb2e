"""Turns files into token tables in which every row of every source is accounted for.

Nothing is imported here: `data.table` and `data.batch` need numpy and pyarrow alone, so that a second start is quick.
"""
