"""The nodes of a job meet, compare their state, test the network between them, and stay in
touch.
"""
