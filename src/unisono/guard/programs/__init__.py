"""`unisono run`: starts and watches an existing training script; the code inside that program is in
`integrations`.
"""
