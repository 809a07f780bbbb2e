"""The model: where its files are, what they say, how it is loaded, how rows share a forward, and how the loss is summed."""
