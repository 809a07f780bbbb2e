"""Reads files of sd-scripts and LoRA-Scripts: their keys, their dataset files, their scripts."""
