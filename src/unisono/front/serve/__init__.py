"""`unisono serve`: answers OpenAI's protocol over HTTP; the model is in a task process."""
