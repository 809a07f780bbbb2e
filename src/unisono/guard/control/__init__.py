"""The authenticated channel between fronts: one connection per node to the head for the life of the
run.
"""
