"""The model: its files, their contents, loading, the forward pass of flat rows, and the sum of the
loss.
"""
