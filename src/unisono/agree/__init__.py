"""Whether all nodes and ranks mean the same run: pure comparison of what each brings to the table (DESIGN B3)."""
