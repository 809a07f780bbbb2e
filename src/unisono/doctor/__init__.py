"""Looks before anything is started whether training will work here and between nodes, and says what to type if not."""
