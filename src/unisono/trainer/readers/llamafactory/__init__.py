"""Reads files of LLaMA-Factory: their keys, their datasets, their templates with the encoder."""
