"""What runs inside other people's processes: the hook of `unisono run`, torchrun's rendezvous back-end, callbacks, `guarded`."""
