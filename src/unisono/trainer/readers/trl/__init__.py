"""Reads files and commands of TRL: their keys, and those of Hugging Face's TrainingArguments."""
