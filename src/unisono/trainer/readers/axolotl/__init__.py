"""Reads files of axolotl: their keys and their datasets."""
