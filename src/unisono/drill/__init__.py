"""Fire drills: each fault is put into a tiny real run on this machine, and what is said of it is held against what should be."""
