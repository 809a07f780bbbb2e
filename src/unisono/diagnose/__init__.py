"""Reads what a dead run left behind, anybody's, and names the cause: sources, events, facts, rules, one verdict."""
