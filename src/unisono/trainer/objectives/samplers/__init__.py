"""Where the answers of GRPO are sampled: by the rank itself, or by a server."""
