"""The ladder: a real collective, and where it fails the fewest settings with which it works."""
