"""`unisono studio`: a page from which runs are started, steered and tried
(docs/decisions/0045-studio.md).
"""
