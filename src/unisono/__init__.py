"""unisono: fine-tune language models; runs agree before they start, and say why when they stop."""

__version__ = "0.1.0"
__all__ = ["__version__"]
