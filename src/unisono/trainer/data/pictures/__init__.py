"""Pictures in rows: where rows have them, decoding within bounds, and what a processor of
transformers makes of them.
"""
