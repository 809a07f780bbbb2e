"""Answers of several turns: the model calls tools of an environment, and goes on with their
results.

All answers of a rollout take their turns together, so which of them share a forward does not
depend on how long a tool takes, and a repeated rollout has the same bits.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.base.causes import Verdict
from unisono.base.errors import ConfigError
from unisono.trainer.config.rollout_sections import RolloutSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import RowError
from unisono.trainer.data.build import make_encoder
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.directory import locate_tokenizer
from unisono.trainer.model.engine import GeneratedAnswer
from unisono.trainer.objectives.environments.episode_calls import (
    RESET,
    REWARD,
    EnvironmentFailure,
    Given,
    MethodCall,
    RequestedCall,
    as_prompt,
)
from unisono.trainer.objectives.environments.pool import EnvironmentPool, OpenEpisode
from unisono.trainer.objectives.environments.turns import Message, Rendering, TurnWriter
from unisono.trainer.objectives.rewards.calls import RewardFailure, cut
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.objectives.sampled import AnswerGroup, EnvironmentReward, SampledAnswer
from unisono.trainer.plan.task_requests import SamplingParams

Sample = Callable[[Sequence[GeneratedAnswer]], Verdict | None]
"""Completes answers, see `samplers.sampler.AnswerSampler.sample`."""
SamplingOf = Callable[[AnswerGroup, int, int], SamplingParams]
"""How the turn of an answer is sampled, by its group, its number there, and the number of the
turn.
"""


@dataclass(eq=False)
class _OpenAnswer:
    """An answer while it is made.

    Attributes:
        rendering: of the conversation so far; None before `reset`.
        prompt: tokens.
        tokens: after the prompt.
        is_sampled: of each of them, whether the model has written it.
        log_probs: of those that it has written.
        said: messages after the prompt, for rewards.
        turns: of the model.
        refused: calls of tools that gave an error.
        ended: why it has ended; None: it goes on.
    """

    group: AnswerGroup
    number: int
    episode: OpenEpisode
    rendering: Rendering | None = None
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    turns: int = 0
    refused: int = 0
    ended: Literal["stop", "length", "turns", "failed"] | None = None
    reward: float | None = None

    def append(self, tokens: Sequence[int], log_probs: Sequence[float] | None) -> None:
        """Takes tokens of the model, or others."""
        self.tokens += tokens
        self.is_sampled += [log_probs is not None] * len(tokens)
        self.log_probs += log_probs or []

    def fail(self, method: str, text: str, where: str) -> None:
        """Ends it before its end."""
        self.episode.failure = EnvironmentFailure(self.group.row, method, "value", 0.0, text, where)


class EpisodePlayer:
    """Lets the model act in an environment.

    Attributes:
        most_prompt: tokens of a prompt.
    """

    def __init__(
        self, pool: EnvironmentPool, writer: TurnWriter, section: RolloutSection, *, most_prompt: int
    ) -> None:
        """A player.

        Args:
            pool: that was started; `close` closes it.
            writer: of conversations.
            section: of the config, with an environment.
            most_prompt: tokens of a prompt.
        """
        assert section.environment is not None, "the config has an environment"
        self._pool, self._writer, self._section = pool, writer, section
        self._environment, self.most_prompt = section.environment, most_prompt
        self._failures: list[RewardFailure] = []

    @property
    def reward_name(self) -> str | None:
        """Of the reward that the environment gives; None if it gives none."""
        return self._pool.name if self._pool.has_reward else None

    def take_failures(self) -> list[RewardFailure]:
        """The failures since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def play(
        self,
        groups: Sequence[AnswerGroup],
        *,
        size: int,
        seed_of: Callable[[AnswerGroup, int], int],
        sampling_of: SamplingOf,
        sample: Sample,
        ranks: Sequence[int] = (),
    ) -> Verdict | None:
        """Gives groups their answers, with the rewards of the environment.

        Args:
            groups: without answers.
            size: answers to each.
            seed_of: of Python's random numbers in an episode.
            sampling_of: see `SamplingOf`.
            sample: completes answers.
            ranks: for the verdict.

        Returns:
            why the run ends; None: all have their answers.
        """
        answers = [
            _OpenAnswer(group, number, self._pool.begin(group.row))
            for group in groups
            for number in range(size)
        ]
        try:
            verdict = self._reset(answers, seed_of, ranks)
            while verdict is None and (going := [one for one in answers if one.ended is None]):
                verdict = self._turn(going, sampling_of, sample) or self._judge(going, ranks)
            if verdict is None and self._pool.has_reward:
                verdict = self._rate(answers, ranks)
        finally:
            self._pool.end_all()
        if verdict is None:
            for group in groups:
                group.answers = [self._done(one) for one in answers if one.group is group]
        return verdict

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._pool.close()

    # ---- an answer's beginning, its turns, its end

    def _reset(
        self, answers: Sequence[_OpenAnswer], seed_of: Callable[[AnswerGroup, int], int], ranks: Sequence[int]
    ) -> Verdict | None:
        calls: list[tuple[OpenEpisode, MethodCall]] = [
            (
                one.episode,
                {
                    "method": RESET,
                    "arguments": {"prompt": one.group.record["prompt"], **one.group.record["columns"]},
                    "seed": seed_of(one.group, one.number),
                },
            )
            for one in answers
        ]
        for one, given in zip(answers, self._pool.call(calls), strict=True):
            if given is not None:
                self._begin(one, given)
        return self._judge(answers, ranks)

    def _begin(self, one: _OpenAnswer, given: Given) -> None:
        messages: Any = as_prompt(one.group.record["prompt"]) if given.value is None else given.value
        try:
            one.rendering = self._writer.begin(messages)
        except RowError as error:
            one.fail(RESET, f"its messages cannot be rendered: {error.why}", self._pool.where)
            return
        one.prompt = one.rendering.tokens
        if len(one.prompt) > self.most_prompt:
            text = f"its messages have {len(one.prompt)} tokens with the tools, and {self.most_prompt} are allowed"
            one.fail(RESET, f"{text} (data.max_length less rollout.max_new_tokens)", self._pool.where)

    def _turn(
        self, answers: Sequence[_OpenAnswer], sampling_of: SamplingOf, sample: Sample
    ) -> Verdict | None:
        """A turn of the model in each answer, and the calls that it makes."""
        written = [
            GeneratedAnswer(
                [*one.prompt, *one.tokens],
                self._section.max_new_tokens - len(one.tokens),
                sampling_of(one.group, one.number, one.turns),
            )
            for one in answers
        ]
        verdict = sample(written)
        if verdict is not None:
            return verdict
        calling: list[tuple[_OpenAnswer, list[RequestedCall]]] = []
        for one, turn in zip(answers, written, strict=True):
            stop = [] if turn.stop_token is None else [turn.stop_token]
            one.append([*turn.tokens, *stop], turn.log_probs)
            one.turns += 1
            text, calls = self._writer.calls_in(turn.tokens)
            message: Message = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [call.to_message() for call in calls]
            one.said.append(message)
            if turn.ended == "length":
                one.ended = "length"
            elif calls:
                calling.append((one, calls))
            else:
                one.ended = "stop"
        self._call(calling)
        return None

    def _call(self, calling: Sequence[tuple[_OpenAnswer, list[RequestedCall]]]) -> None:
        """Calls tools, those of an answer one after the other, and appends what they give."""
        results: dict[int, list[str]] = {id(one): [] for one, _ in calling}
        for number in range(max((len(calls) for _, calls in calling), default=0)):
            now = [
                (one, calls[number])
                for one, calls in calling
                if number < len(calls) and not one.episode.failure
            ]
            requests: list[tuple[OpenEpisode, MethodCall]] = [
                (one.episode, {"method": call.name, "arguments": call.arguments}) for one, call in now
            ]
            for (one, _), given in zip(now, self._pool.call(requests), strict=True):
                if given is not None:
                    one.refused += given.is_refused
                    results[id(one)].append(str(given.value))
        for one, calls in calling:
            if one.episode.failure is None:
                self._go_on(one, calls, results[id(one)])

    def _go_on(self, one: _OpenAnswer, calls: Sequence[RequestedCall], results: Sequence[str]) -> None:
        """Appends the results of tools, or ends the answer."""
        assert one.rendering is not None, "it has a prompt"
        one.said += [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        if one.turns >= self._section.turns:
            one.ended = "turns"
            return
        try:
            one.rendering, following = self._writer.follow(one.rendering, calls, results)
        except RowError as error:
            one.fail(calls[-1].name, error.why, self._pool.where)
            return
        if len(one.tokens) + len(following) >= self._section.max_new_tokens:
            one.ended = "length"  # a result is never cut
            return
        one.append(following, None)

    def _rate(self, answers: Sequence[_OpenAnswer], ranks: Sequence[int]) -> Verdict | None:
        """Gives answers the reward of the environment."""
        rated = [one for one in answers if one.ended != "failed"]
        given = self._pool.call([(one.episode, {"method": REWARD, "arguments": {}}) for one in rated])
        for one, reward in zip(rated, given, strict=True):
            if reward is not None and isinstance(reward.value, int | float):
                one.reward = float(reward.value)
        return self._judge(answers, ranks)

    # ---- failures

    def _judge(self, answers: Sequence[_OpenAnswer], ranks: Sequence[int]) -> Verdict | None:
        """Ends answers that have failed; or what ends the run."""
        for one in answers:
            failure = one.episode.failure
            if failure is None or one.ended == "failed":
                continue
            one.ended = "failed"
            noted = RewardFailure(
                failure.row,
                one.number,
                f"{self._pool.name}.{failure.method}",
                failure.kind,
                failure.seconds,
                failure.text,
                failure.where,
                cut(one.group.record["prompt"]),
                cut(one.said),
            )
            self._failures.append(noted)
            if self._environment.on_error == "error":
                return verdict_on(noted, *ranks, what="environment")
        return None

    def _done(self, one: _OpenAnswer) -> SampledAnswer:
        on_error, is_failed = self._environment.on_error, one.ended == "failed"
        value = one.reward
        if is_failed:
            value = None if isinstance(on_error, str) else float(on_error)
        return SampledAnswer(
            one.prompt,
            one.tokens,
            one.log_probs,
            self._writer.text_of(one.tokens),
            is_truncated=one.ended == "length",
            is_sampled=one.is_sampled,
            messages=one.said,
            turns=one.turns,
            refused_calls=one.refused,
            environment=EnvironmentReward(
                self._pool.name, value, self._environment.weight, leaves=is_failed and value is None
            ),
        )


def player_in(
    pool: EnvironmentPool, config: RunConfig, tokenizer: Any, *, stop_ids: Set[int], table: TokenTable
) -> EpisodePlayer:
    """A player of a run or an evaluation, whose environment it starts.

    Args:
        pool: that was not started.
        config: with an environment.
        tokenizer: of transformers.
        stop_ids: tokens that end a turn.
        table: of the prompts.

    Raises:
        ConfigError: if the class cannot be loaded or gives no reward where none else is, or if the
            chat template does not write its tools.
    """
    pool.start()
    try:
        _refuse_unrated(pool, config)
        encoder = make_encoder(config, tokenizer, locate_tokenizer(config))
        writer = TurnWriter(encoder, tokenizer, pool.tools, stop_ids)
        record: Any = table.record(0)
        writer.check(as_prompt(record["prompt"]), environment=pool.label)
    except BaseException:  # also Ctrl-C: no process may stay
        pool.close()
        raise
    most = config.data.max_length - config.rollout.max_new_tokens
    return EpisodePlayer(pool, writer, config.rollout, most_prompt=most)


def _refuse_unrated(pool: EnvironmentPool, config: RunConfig) -> None:
    """Refuses an environment without a reward, where none else is.

    Raises:
        ConfigError: then.
    """
    if not config.rewards and not pool.has_reward:
        raise ConfigError.of(
            f"nothing rates the answers: the environment {pool.label} has no method `reward`",
            where=pool.where,
            fix="write `def reward(self) -> float` in it, or name `rewards` in the config",
        )
