"""What a server must be able to do, and the refusals before the first step."""

from collections.abc import Sequence

from unisono.base.errors import ConfigError
from unisono.guard.facts.environment import sampler_key
from unisono.trainer.config.rollout_sections import RolloutSection
from unisono.trainer.objectives.samplers.http_client import HttpClient
from unisono.trainer.objectives.samplers.probe import BOUNDS, Probe, ProbeAnswer
from unisono.trainer.objectives.samplers.vllm_server import BadAnswer, ServerAway, ServerRefused, VllmServer
from unisono.trainer.plan import RunPlan

HOW = (
    "start it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank"
    " RANK`; see docs/how-to/grpo.md"
)
"""How a server is started that can."""


def client_of(section: RolloutSection) -> HttpClient:
    """A client of the server of a config, with the key of the environment.

    Raises:
        ConfigError: if the key cannot be sent.
    """
    assert section.url is not None, "the config has checked it"
    key = sampler_key()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError.of(
            "UNISONO_SAMPLER_KEY cannot be sent: it has characters other than printable ASCII",
            where="environment",
            fix="set it to the key that the server was started with (`--api-key`)",
        )
    return HttpClient(section.url, key)


def check_server(plan: RunPlan) -> None:
    """Asks the server of a plan what it can do, before the model is loaded.

    Raises:
        ConfigError: if it does not answer, cannot load adapters, or takes shorter prompts.
    """
    section, where = plan.config.rollout, "rollout.url"
    client = client_of(section)
    server = VllmServer(client, answer_s=1.0, vocabulary=0, on_wait=lambda: None)
    try:
        model = server.models()
        can_load = server.can_load()
    except ServerAway as error:
        raise not_there(section, str(error)) from None
    except (ServerRefused, BadAnswer) as error:
        is_key = isinstance(error, ServerRefused) and error.status in (401, 403)
        raise ConfigError.of(
            f"the server {section.url} does not list its models",
            where=where,
            why=str(error),
            fix="set UNISONO_SAMPLER_KEY to its key"
            if is_key
            else f"set the address of a vLLM server: {HOW}",
        ) from None
    finally:
        client.close()
    if not can_load:
        raise ConfigError.of(
            f"the server {section.url} cannot load adapters",
            where=where,
            why="each step has new weights, which the server gets as a LoRA adapter",
            fix=HOW,
        )
    longest = plan.config.data.max_length
    if model.max_length is not None and model.max_length < longest:
        raise ConfigError.of(
            f"the server {section.url} takes {model.max_length} tokens of prompt and answer, but"
            f" data.max_length is {longest}",
            where=where,
            why="a prompt and its answer may have that many",
            fix=f"start it with `--max-model-len {longest}`, or set data.max_length to {model.max_length}",
        )


def not_there(section: RolloutSection, words: str) -> ConfigError:
    """The error before the first step."""
    return ConfigError.of(
        f"the server {section.url} does not answer",
        where="rollout.url",
        why=words,
        fix=f"wait until it is ready, or {HOW}",
    )


def refuse_other_model(plan: RunPlan, answers: Sequence[ProbeAnswer]) -> None:
    """Compares short answers of the served base model with the model here without an adapter.

    Raises:
        ConfigError: if they are not of the same model.
    """
    probe = Probe(0, [ProbeAnswer(one.tokens, one.served, one.bare) for one in answers])
    section, bound = plan.config.rollout, BOUNDS[plan.dtype]
    if probe.distance <= bound:
        return
    token, served, here = probe.farthest
    fix = f"serve the model of this run with `--dtype {plan.dtype}`"
    if section.temperature != 1:
        fix += (
            "; if it is the same model, start it with `--logprobs-mode processed_logprobs`: rollout.temperature is"
            f" {section.temperature:g}"
        )
    raise ConfigError.of(
        f"the server {section.url} gives different log-probabilities than {plan.config.model.path} without"
        " an adapter",
        where="rollout.url",
        why=(
            f"over {probe.tokens} tokens the distance is {probe.distance:.2g}, and the bound is {bound:g};"
            f" token {token} has"
            f" {served:.4f} there and {here:.4f} here"
        ),
        fix=fix,
    )
