"""The figures of a plan about the parts of a language model, and about its adapter in each."""

from math import prod
from pathlib import Path

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.directory import SCORE
from unisono.trainer.model.files import read_safetensors_header, weight_files
from unisono.trainer.model.parts import (
    Weight,
    adaptable_weights,
    adapter_figures,
    count_parts,
    weights_in_files,
)
from unisono.trainer.plan.run_plan import ModelFacts


def with_parts(config: RunConfig, facts: ModelFacts) -> ModelFacts:
    """The figures of a model with those of its parts, and of what the config's adapter changes.

    Only if the names of its files are not those of a plain decoder, torch is imported: the model is
    made on the meta device.

    Raises:
        ModelError: if transformers does not make a model of it, or the adapter does not match it.
    """
    random, head = config.model.weights == "random", SCORE if config.objective == "reward" else None
    files = [] if random else weight_files(Path(facts.directory))
    headers = [header for file in files for header in read_safetensors_header(file)]
    headers = [header for header in headers if head is None or header.name != "lm_head.weight"]
    weights, parts = weights_in_files(headers)
    figures: dict[str, object] = {}
    if not facts.has_plain_mlps or sum(weight.in_out for weight in weights) != facts.linear_in_out:
        from unisono.trainer.model.load import outline_base

        trust = config.model.trust_remote_code
        model = outline_base(Path(facts.directory), trust_remote_code=trust, reward=head is not None)
        weights, parts = adaptable_weights(model, head=head), count_parts(model, head=head)
        if random:
            figures = _sizes(weights, parts)
    elif head is None:  # the module is there even if it shares the embedding's matrix
        shape = (facts.vocab_size, facts.hidden_size)
        weights.append(Weight("lm_head", "lm_head.weight", "head", shape, False, ""))
    if config.adapter is not None:
        figures |= adapter_figures(weights, config.adapter, head=head)
    return facts.model_copy(update={"parts": parts, **figures})


def _sizes(weights: list[Weight], parts: dict[str, int]) -> dict[str, object]:
    """What config.json alone shows of models like Llama only."""
    inside = [weight for weight in weights if weight.part != "head"]
    return {
        "parameters": sum(parts.values()),
        "linear_parameters": sum(prod(weight.shape) for weight in inside),
        "linear_in_out": sum(weight.in_out for weight in inside),
    }
