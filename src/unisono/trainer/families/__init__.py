"""Families of models: what a run does in another way with an image model than with a language
model.
"""
