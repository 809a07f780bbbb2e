"""One rank: `python -m unisono.worker plan.json`. Does what the plan says and decides nothing again."""
