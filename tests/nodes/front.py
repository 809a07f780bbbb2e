"""`unisono …` on a machine that it has not got: `python front.py ANSWERS.json train CONFIG …`, as tests start it."""
