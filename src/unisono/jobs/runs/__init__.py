"""Carries one training run from the request to the result: plan, claim, the head's part, a member's
part, restarts.
"""
