"""Starts workers and tasks as processes, watches over them, and carries one training start from config to result."""
