"""What needs torch or the tokenizer beside training: each task is a process, `python -m unisono.task NAME request.json`."""
