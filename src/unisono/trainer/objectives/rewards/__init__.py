"""Rewards of sampled answers: functions of the user's own, and built-in ones, in processes of
their own.

Importing this loads neither torch nor numpy.
"""
