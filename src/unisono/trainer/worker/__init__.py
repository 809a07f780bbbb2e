"""One rank: `python -m unisono.worker plan.json`. Follows the plan and decides nothing again."""
