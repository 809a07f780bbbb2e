"""`unisono run`: starts and watches somebody else's program; what runs inside that program is in `integrations`."""
