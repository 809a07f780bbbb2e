"""`unisono studio`: a page from which runs are started, steered and tried."""
