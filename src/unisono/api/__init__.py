"""The Python interface: `unisono.train` and its neighbours, each through a front that runs as a process of its own.

`unisono` itself names what is public, and imports it on first use. Here nothing imports torch but `loading`.
"""
