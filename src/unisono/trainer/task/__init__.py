"""Work other than training that needs torch or the tokenizer: each task is a process, `python -m
unisono.task NAME request.json`.
"""
