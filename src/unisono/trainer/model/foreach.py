"""Functions of torch over lists of tensors: on a GPU a few kernels for all of them.

torch 2.13 has no public names for them; its own optimizers and gradient clipping call these.
"""

import torch

copy_ = torch._foreach_copy_
multiply_ = torch._foreach_mul_
norms = torch._foreach_norm  # noqa: SLF001 - get_total_norm gives one norm for all tensors
