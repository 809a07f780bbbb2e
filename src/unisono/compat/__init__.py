"""Other tools' files: recognised by their keys."""
