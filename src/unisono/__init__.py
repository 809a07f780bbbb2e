"""unisono: fine-tune language models; nodes agree before a run starts, and a failed run reports its cause."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.integrations.inside.guarded_process import guarded

__version__ = "0.1.0"
__all__ = ["__version__", "guarded"]


def __getattr__(
    name: str,
) -> Any:  # imported on first access, so that the front and its children do not pay for it
    if name == "guarded":
        from unisono.integrations.inside.guarded_process import guarded

        return guarded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
