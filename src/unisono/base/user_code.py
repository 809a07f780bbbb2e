"""How configs refer to code of the user's own."""

from pathlib import Path


def own_objective(objective: str) -> tuple[Path, str] | None:
    """File and class of an objective of the user's own; None for ours."""
    path, found, name = objective.rpartition(":")
    return (Path(path), name) if found and path.endswith(".py") else None


MODEL_CODE = {"/transformers_modules/": "the model's own code (model.trust_remote_code)"}
"""Python code of a model's repository: its name, by the folder to which transformers copies it."""
