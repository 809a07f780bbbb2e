"""unisono: fine-tune language models; runs agree before they start, and say why when they stop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.integrations.guarded import guarded

__version__ = "0.1.0"
__all__ = ["__version__", "guarded"]


def __getattr__(
    name: str,
) -> Any:  # loaded when it is asked for: the front and its children pay nothing for it
    if name == "guarded":
        from unisono.integrations.guarded import guarded

        return guarded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
