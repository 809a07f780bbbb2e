"""Optimizers: a line of `OPTIMIZERS` for each.

What builds them needs torch, and is imported in the ranks alone.
"""

from dataclasses import dataclass, field

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
        package: the package that it comes from, if that is not one that training needs anyway.
        arguments: further arguments of a class.
        state_values: values of its state for each trained value, of `state_dtype` if it uses that
            key, else of `value_bytes`.
        value_bytes: bytes of such a value.
        adapter_values: the same of an adapter, where it differs.
        matrix_values: the same of a layer's matrix, where it differs.
        is_factored: whether the state of a matrix is a float32 for each row and column instead.
        needs_full: why weights cannot be sharded, as the begin of a sentence; empty: they can.
        trains_adapters: whether it can train an adapter.
        updates_blocks: whether updates of a few parameters at a time are those of all at once, so
            that gradients may be widened in blocks.
        has_one_rate: whether all parameters have the same learning rate.
        scales_rate: whether it finds the learning rate itself, and `lr` is a factor of it.
        transformers: its names there, for `optim` in files of other tools.
        sd_scripts: its names there, in lower case.
    """

    builder: str = ""
    keys: tuple[str, ...] = ()
    package: str = ""
    arguments: dict[str, object] = field(default_factory=dict)
    state_values: int = 2
    value_bytes: float = 4
    adapter_values: float | None = None
    matrix_values: float | None = None
    is_factored: bool = False
    needs_full: str = ""
    trains_adapters: bool = True
    updates_blocks: bool = False
    has_one_rate: bool = False
    scales_rate: bool = False
    transformers: tuple[str, ...] = ()
    sd_scripts: tuple[str, ...] = ()

    def state_bytes(self, state_dtype: str) -> float:
        """Bytes of the state for a trained value that is in no matrix of a layer."""
        is_compact = "state_dtype" in self.keys and state_dtype == "bfloat16"
        return self.state_values * (2 if is_compact else self.value_bytes)


OWN_KEYS = ("muon_lr", "muon_scale", "betas", "eps", "state_dtype", "options")
"""Keys of `optim` that only some optimizers use."""

_ADAM = ("betas", "eps", "options")
_BLOCKS_OF_8_BITS = 1 + 4 / 256  # a byte, and its share of the float32 scale of 256 values
_BITSANDBYTES = "the kernels of bitsandbytes need full tensors"

OPTIMIZERS = {
    "adamw": OptimizerKind(
        "unisono.trainer.training.optim:build_adamw",
        ("betas", "eps", "state_dtype"),
        updates_blocks=True,
        transformers=("adamw_torch", "adamw_torch_fused", "adamw_hf"),
        sd_scripts=("adamw", "adamw8bit", "pagedadamw8bit", "pagedadamw"),
    ),
    "adamw_8bit": OptimizerKind(
        "bitsandbytes.optim:AdamW8bit", _ADAM, "bitsandbytes",
        value_bytes=_BLOCKS_OF_8_BITS, needs_full=_BITSANDBYTES, transformers=("adamw_8bit", "adamw_bnb_8bit"),
    ),
    "adamw_paged": OptimizerKind(
        "bitsandbytes.optim:PagedAdamW", _ADAM, "bitsandbytes",
        needs_full=_BITSANDBYTES, transformers=("paged_adamw_32bit",),
    ),
    "adamw_8bit_paged": OptimizerKind(
        "bitsandbytes.optim:PagedAdamW8bit", _ADAM, "bitsandbytes",
        value_bytes=_BLOCKS_OF_8_BITS, needs_full=_BITSANDBYTES, transformers=("paged_adamw_8bit",),
    ),
    "adafactor": OptimizerKind(
        "unisono.trainer.training.adafactor:SteadyAdafactor", ("options",),
        arguments={"scale_parameter": False, "relative_step": False},
        state_values=1, is_factored=True, needs_full="adafactor needs rows and columns of full matrices",
        transformers=("adafactor",),
    ),
    "lion": OptimizerKind(
        "bitsandbytes.optim:Lion", ("betas", "options"), "bitsandbytes",
        state_values=1, needs_full=_BITSANDBYTES, transformers=("lion_32bit",),
    ),
    "lion_8bit": OptimizerKind(
        "bitsandbytes.optim:Lion8bit", ("betas", "options"), "bitsandbytes",
        state_values=1, value_bytes=_BLOCKS_OF_8_BITS, needs_full=_BITSANDBYTES, transformers=("lion_8bit",),
    ),
    "prodigy": OptimizerKind(
        "prodigyopt:Prodigy", _ADAM, "prodigyopt",
        # B of an adapter begins with zeros, and has no copy of its first value.
        state_values=4, adapter_values=3.5, has_one_rate=True, scales_rate=True,
        needs_full="prodigy finds its learning rate from all parameters",
    ),
    "schedule_free": OptimizerKind(
        "schedulefree:AdamWScheduleFree", _ADAM, "schedulefree",
        needs_full="schedule_free needs full tensors", transformers=("schedule_free_adamw",),
    ),
    "muon": OptimizerKind(
        "unisono.trainer.training.optim:build_muon",
        ("muon_lr", "muon_scale", "betas", "eps", "state_dtype"),
        matrix_values=1,
        updates_blocks=True,
        trains_adapters=False,
    ),
}  # fmt: skip

OTHER = OptimizerKind(keys=("options",), needs_full="this optimizer needs full tensors")
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


def optimizer_of_transformers(name: str) -> str | None:
    """Our name of an optimizer of transformers' `optim`; None if there is none here."""
    return next((ours for ours, kind in OPTIMIZERS.items() if name in kind.transformers), None)
