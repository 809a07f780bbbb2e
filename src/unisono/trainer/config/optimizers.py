"""Optimizers: a line of `OPTIMIZERS` for each.

What builds them needs torch, and is imported in the ranks alone.
"""

from dataclasses import dataclass

from unisono.base import extensions
from unisono.base.user_code import own_class


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer.

    Attributes:
        builder: `MODULE:NAME` of what makes it in a rank: a function with the arguments of
            `train.optim.build_adamw`, or a class that is called like those of the user's own, see
            `OTHER`.
        keys: of the keys that only some optimizers have (`OWN_KEYS`), those that it uses.
        state_values: values of its state for each trained value, of `state_dtype` if it uses that
            key, else float32.
        needs_full: why weights cannot be sharded, as the begin of a sentence; empty: they can.
        trains_adapters: whether it can train an adapter.
        updates_blocks: whether updates of a few parameters at a time are those of all at once, so
            that gradients may be widened in blocks.
        transformers: its names there, for `optim` in files of LLaMA-Factory.
        sd_scripts: its names there, in lower case.
    """

    builder: str = ""
    keys: tuple[str, ...] = ()
    state_values: int = 2
    needs_full: str = ""
    trains_adapters: bool = True
    updates_blocks: bool = True
    transformers: tuple[str, ...] = ()
    sd_scripts: tuple[str, ...] = ()

    def state_bytes(self, state_dtype: str) -> int:
        """Bytes of the state for a trained value."""
        is_compact = "state_dtype" in self.keys and state_dtype == "bfloat16"
        return self.state_values * (2 if is_compact else 4)


OWN_KEYS = ("muon_lr", "muon_scale", "betas", "eps", "state_dtype", "options")
"""Keys of `optim` that only some optimizers use."""

OPTIMIZERS = {
    "adamw": OptimizerKind(
        "unisono.trainer.training.optim:build_adamw",
        ("betas", "eps", "state_dtype"),
        transformers=("adamw_torch", "adamw_torch_fused", "adamw_hf"),
        sd_scripts=("adamw", "adamw8bit", "pagedadamw8bit", "pagedadamw"),
    ),
    "muon": OptimizerKind(
        "unisono.trainer.training.optim:build_muon",
        ("muon_lr", "muon_scale", "betas", "eps", "state_dtype"),
        needs_full="muon needs full matrices",
        trains_adapters=False,
    ),
}

OTHER = OptimizerKind(keys=("options",), needs_full="this optimizer needs full tensors", updates_blocks=False)
"""A class of the user's own, or of another package: a torch.optim.Optimizer, called with parameter
groups that have `lr` and `weight_decay`, with `lr`, and with `optim.options`. Its memory is not
known; AdamW's is assumed.
"""


def optimizer_named(name: str) -> OptimizerKind:
    """An optimizer of the table, of the user's own (`FILE.py:CLASS`), or of another package.

    Raises:
        KeyError: if there is none.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if own_class(name) or name in extensions.extensions(extensions.OPTIMIZERS):
        return OTHER
    raise KeyError(name)
