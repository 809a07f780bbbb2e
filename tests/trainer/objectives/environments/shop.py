"""Environments of tests, as users write them."""

import os
import random
import sys
import time
from typing import Any

PRICES = {"tea": 7, "milk": 3, "bread": 5, "rice": 4, "salt": 2, "soup": 8, "fish": 9, "cake": 6}


class Shop:
    """A shop whose prices the model does not know."""

    def reset(self, row: dict[str, Any]) -> None:
        """Nothing has been looked up; the prompt of the row stays."""
        self.item: str = row["item"]
        self.seen: list[str] = []

    def price(self, item: str) -> int:
        """The price of something.

        Args:
            item: what to buy
        """
        self.seen.append(item)
        return PRICES[item]

    def reward(self) -> float:
        """1 if the price of the item was looked up, once."""
        return float(self.seen == [self.item])


class Odd:
    """Methods that do odd things, by what the row says."""

    def reset(self, row: dict[str, Any]) -> Any:
        self.row = row
        what = row.get("reset")
        if what == "raises":
            raise ValueError("the row has no item")
        if what == "hangs":
            time.sleep(1e6)
        if what == "number":
            return 7
        if what == "a set":
            return [{"role": "user", "content": "x", "tags": {1}}]
        return what

    def add(self, a: int, b: int = 1) -> int:
        """Adds.

        Args:
            a: a number
            b: another one
        """
        return a + b

    async def later(self, words: list[str]) -> dict[str, Any]:
        """Gives what it got.

        Args:
            words: any
        """
        return {"words": words, "who": os.getpid(), "drawn": random.random()}

    def fails(self, how: str) -> None:
        """Fails.

        Args:
            how: in which way
        """
        if how == "hangs":
            time.sleep(1e6)
        if how == "exits":
            os._exit(3)
        if how == "sys.exit":
            sys.exit("no")
        if how == "memory":
            bytearray(1 << 40)
        raise KeyError(how)

    def undocumented(self) -> str:
        return ""

    def reward(self) -> Any:
        """What the row says."""
        return self.row.get("reward")
