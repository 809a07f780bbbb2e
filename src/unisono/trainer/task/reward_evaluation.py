"""The task `eval_rewards`: answers to held-out prompts, their rewards, and pass@k."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import torch

from unisono.base.causes import Verdict
from unisono.base.errors import EndedByVerdict, Problem, UsageError
from unisono.base.events import Reporter
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.table import TableRows
from unisono.trainer.config.data_sections import DataSection, SourceSection
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.config.rollout_sections import RewardSection, RolloutSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import GRPO, lf_name
from unisono.trainer.data.token_table import Split, TokenTable
from unisono.trainer.families import rows_of
from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.objectives.answer_scores import answer_scores
from unisono.trainer.objectives.environments.episodes import EpisodePlayer, player_in
from unisono.trainer.objectives.environments.pool import EnvironmentPool
from unisono.trainer.objectives.rewards.calls import RewardError, RewardFailure
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.objectives.sampled import AnswerGroup, SampledAnswer
from unisono.trainer.plan.task_requests import (
    EvaluateRewardsRequest,
    PrepareRequest,
    RewardsEvaluated,
    SamplingParams,
)
from unisono.trainer.task.evaluation_rows import evaluation_config, require_rows, table_rows
from unisono.trainer.task.inference import InferenceModel, open_requested, refuse_code
from unisono.trainer.task.target import requested_target

_ROWS = 512  # answers that are computed together
_ANSWERS = 512  # that are scored before others are sampled, so that a failing reward shows early
_PART_TOKENS = 8_192
_SHOWN_FAILURES = 3
_FIX = (
    "fix the function, or set on_error of the reward to skip or a number: --reward '{use: …, on_error: skip}'"
)


def run(request: EvaluateRewardsRequest, report: Reporter) -> RewardsEvaluated:
    """Samples and scores answers; `figures` has prompts, answers and those of `answer_scores`.

    Raises:
        UsageError: if there are no rewards or no prompts, or a reward is code that is not trusted.
        EndedByVerdict: if a reward fails whose `on_error` is `error`.
    """
    source = _EvaluatedPrompts.of(request)
    opened = open_requested(request.model, report)
    config = _config(opened, source, request)
    digests = own_code_digests(config)
    if not request.rewards:
        _report_changes(opened, digests, report)
    report.phase("model", "reading the model's files")
    data, _ = rows_of(config).prepare(PrepareRequest(config, request.cache_dir), report)
    table = TokenTable.open(Path(data.cache_dir), source.split)
    if data.pictures is not None and opened.processor is None:
        opened = open_requested(request.model, report, sees=True)
    groups = [_group(table, row) for row in range(min(request.limit or table.rows, table.rows))]
    sampler = _AnswerSampler(opened, config, table_rows(opened, data, table), request)
    waiting, threads = partial(_wait, report), torch.get_num_threads()
    with (
        RewardPool(config.rewards, digests, on_wait=waiting, threads=threads) as pool,
        sampler.acting_in(config, digests, table, report),
    ):
        failures = _sample_and_score(sampler, pool, groups, report)
        names = [*pool.names, *sampler.reward_names]
        scores = answer_scores(groups, names, samples=request.samples, threshold=request.threshold)
    _report_failures(failures, report)
    return {
        "description": opened.target.description,
        "source": source.name,
        "samples": request.samples,
        "temperature": sampler.sampling.temperature,
        "threshold": request.threshold,
        "ledger": data.ledger,
        "formats": data.formats,
        "figures": {"prompts": len(groups), "answers": len(groups) * request.samples, **scores},
        "rows": [line for group in groups for line in _lines(group)],
    }


@dataclass(frozen=True)
class _EvaluatedPrompts:
    """What is evaluated.

    Attributes:
        trained: the config of a run that was trained with rewards; None for others.
        rewards: of its config, or of the request.
        data: the source of the prompts instead of the run's; None: rows that the run split off.
        name: of the prompts, for people.
    """

    trained: RunConfig | None
    rewards: list[RewardSection]
    data: str | list[str | SourceSection] | None
    name: str

    @classmethod
    def of(cls, request: EvaluateRewardsRequest) -> Self:
        """What a request names.

        Raises:
            UsageError: if that is nothing, or code that is not trusted.
        """
        target = requested_target(request.model)
        config = target.plan.config if target.plan is not None else None
        trained = config if config is not None and config.objective == GRPO else None
        rewards = list(request.rewards) or (trained.rewards if trained else [])
        environment = trained.rollout.environment if trained else None
        if not rewards and environment is None:
            raise UsageError.of(
                f"{target.name} was not trained with rewards",
                where="--rewards",
                fix="name them on the command line, e.g. --reward exact",
            )
        if not request.trust_code:
            uses = [reward.use for reward in rewards if reward.is_own]
            refuse_code([*uses, *([environment.use] if environment else [])], where="--rewards")
        if request.data is not None:
            require_rows(request.data)
            return cls(trained, rewards, request.data, request.data)
        if trained is None or trained.data.eval is None:
            raise UsageError.of(
                "there are no prompts to evaluate",
                where="--data",
                why="the run's config has no data.eval"
                if trained
                else "only runs with objective grpo have some",
                fix="add --data FILE",
            )
        held_out = trained.data.eval
        data = None if isinstance(held_out, int | float) else held_out  # split off, or a source
        return cls(trained, rewards, data, "the held-out prompts of the run")

    @property
    def split(self) -> Split:
        """The split of the token table that has the prompts."""
        return "eval" if self.data is None else "train"


def _config(opened: InferenceModel, source: _EvaluatedPrompts, request: EvaluateRewardsRequest) -> RunConfig:
    """The config for preparing the prompts, with the rewards and how answers are sampled.

    Raises:
        UsageError: if answers leave no room for a prompt.
    """
    trained, context = source.trained, opened.context
    base = evaluation_config(opened, "unused")
    data, rollout = (trained.data, trained.rollout) if trained else (_prompts_of(base.data), RolloutSection())
    room = data.max_length - rollout.max_new_tokens if trained else context
    automatic = rollout.max_new_tokens if trained else min(rollout.max_new_tokens, context // 2)
    most = request.max_tokens or automatic
    length = min(room + most, context)
    if most >= length:
        raise UsageError.of(
            f"answers of {most} tokens leave no room for a prompt",
            where="--max-tokens",
            why=f"the model reads {context} tokens",
            fix="make it smaller",
        )
    sections: dict[str, object] = {"max_length": length}
    if source.data is not None:
        sections |= {"train": source.data, "eval": None}
    return base.model_copy(
        update={
            "objective": GRPO,
            "rewards": source.rewards,
            "rollout": rollout.model_copy(update={"max_new_tokens": most}),
            "data": data.model_copy(update=sections),
        }
    )


def _prompts_of(data: DataSection) -> DataSection:
    """The data of a run with another objective, for rows that are read as prompts."""
    template = None if lf_name(data.template) is not None else data.template
    return DataSection(train="unused", template=template, plain_texts=data.plain_texts)


def _group(table: TokenTable, row: int) -> AnswerGroup:
    return AnswerGroup(
        0,
        row,
        row,
        table.row_id(row),
        table.row(row)[0].tolist(),
        table.record(row),
        stored=int(table.columns["stored"][row]),
    )


class _AnswerSampler:
    """Samples answers as a run does.

    Attributes:
        size: answers to each prompt.
        sampling: how; a single answer is the most likely one, as in evaluations of a run.
    """

    def __init__(
        self, opened: InferenceModel, config: RunConfig, prompts: TableRows, request: EvaluateRewardsRequest
    ) -> None:
        rollout, eos = config.rollout, opened.tokenizer.eos_token_id
        self._opened, self._seed, self._most = opened, config.seed, rollout.max_new_tokens
        self._stop_ids = set(prompts.table.stop_ids) | ({eos} - {None})
        self._contents = None if prompts.contents is None else prompts.contents.loader
        self._stop_ids.update(() if self._contents is None else self._contents.feature_ids)
        self._player: EpisodePlayer | None = None
        self.size = request.samples
        automatic = rollout.temperature if self.size > 1 else 0.0
        temperature = automatic if request.temperature is None else request.temperature
        self.sampling = SamplingParams(temperature, rollout.top_p, rollout.top_k)

    @property
    def reward_names(self) -> list[str]:
        """Of the reward that the environment gives."""
        name = None if self._player is None else self._player.reward_name
        return [] if name is None else [name]

    @contextmanager
    def acting_in(
        self, config: RunConfig, digests: Mapping[str, str], table: TokenTable, report: Reporter
    ) -> Iterator[None]:
        """A context in which the model acts in the environment of a config, if it has one.

        Raises:
            ConfigError: as `player_in`.
        """
        if config.rollout.environment is None:
            yield
            return
        pool = EnvironmentPool(config.rollout.environment, digests, partial(_wait, report))
        self._player = player_in(pool, config, self._opened.tokenizer, stop_ids=self._stop_ids, table=table)
        with closing(pool):
            yield

    def sample(
        self, groups: Sequence[AnswerGroup], on_end: Callable[[int], None]
    ) -> tuple[Verdict | None, list[RewardFailure]]:
        """Gives groups their answers; or what has failed in the environment.

        Args:
            groups: without answers.
            on_end: called with the number of answers that have ended; with an environment, of those
                of a turn.
        """
        if self._player is not None:
            return self._play(self._player, groups, on_end)
        waiting = [self._waiting(group) for group in groups]
        self._complete(list(chain(*waiting)), on_end)
        tokenizer = self._opened.tokenizer
        for group, answers in zip(groups, waiting, strict=True):
            group.answers = [SampledAnswer.of(group.prompt, answer, tokenizer) for answer in answers]
        return None, []

    def _play(
        self, player: EpisodePlayer, groups: Sequence[AnswerGroup], on_end: Callable[[int], None]
    ) -> tuple[Verdict | None, list[RewardFailure]]:
        def seed_of(group: AnswerGroup, number: int, turn: str = "environment") -> int:
            name = f"evaluated rewards, {turn}"
            return stream_seed(self._seed, name, group.place * self.size + number)

        verdict = player.play(
            groups,
            size=self.size,
            seed_of=seed_of,
            sampling_of=lambda group, number, turn: replace(
                self.sampling, seed=seed_of(group, number, f"turn {turn}")
            ),
            sample=lambda answers: self._complete(answers, on_end),
        )
        return verdict, player.take_failures()

    def _complete(self, answers: Sequence[GeneratedAnswer], on_end: Callable[[int], None]) -> None:
        with self._opened.ready() as model:
            engine = Engine(
                model,
                stop_ids=self._stop_ids,
                pad_id=self._opened.pad_id,
                rows=_ROWS,
                together=not self._opened.forward.rows_apart,
                part_tokens=_PART_TOKENS,
            )
            ended = 0
            with engine.ready():
                for answer in sorted(answers, key=lambda answer: -len(answer.prompt)):
                    engine.add(answer)
                while not engine.is_idle:
                    now = sum(answer.ended is not None for answer in engine.step())
                    ended += now
                    if now:
                        on_end(ended)

    def _waiting(self, group: AnswerGroup) -> list[GeneratedAnswer]:
        sampling = replace(self.sampling, seed=stream_seed(self._seed, "evaluated rewards", group.place))
        pictures = None if self._contents is None else self._contents.load_evaluation([group.stored], [0])
        return [
            GeneratedAnswer(group.prompt, self._most, sampling, place=number, pictures=pictures)
            for number in range(self.size)
        ]


def _sample_and_score(
    sampler: _AnswerSampler, pool: RewardPool, groups: Sequence[AnswerGroup], report: Reporter
) -> list[RewardFailure]:
    """Gives groups their answers and rewards. Returns calls of rewards that failed.

    Raises:
        EndedByVerdict: if one failed whose `on_error` is `error`, or the environment.
    """
    total, failures, size = len(groups) * sampler.size, [], max(1, _ANSWERS // sampler.size)
    for first in range(0, len(groups), size):
        part, before = groups[first : first + size], first * sampler.size

        def show(ended: int, before: int = before) -> None:
            report.phase("rollout", "sampling answers", done=before + ended, total=total)

        verdict, failed = sampler.sample(part, show)
        failures += failed
        if verdict is not None:
            raise EndedByVerdict(
                Problem(verdict.summary, verdict.evidence[0].where, fix=_FIX), verdict=verdict
            )
        try:
            scored = pool.score([group.call() for group in part])
        except RewardError as error:
            verdict = verdict_on(error.failure)
            problem = Problem(verdict.summary, verdict.evidence[0].where, fix=_FIX)
            raise EndedByVerdict(problem, verdict=verdict) from error
        for group, scores in zip(part, scored, strict=True):
            group.take(scores)
            failures += scores.failures
    return failures


def _wait(report: Reporter, text: str) -> None:
    report.phase("reward", f"waiting for {text}")


def _report_changes(opened: InferenceModel, digests: Mapping[str, str], report: Reporter) -> None:
    """Warns of files of rewards that are not those of the training."""
    planned = opened.target.plan.code_digests if opened.target.plan is not None else {}
    for key, digest in digests.items():
        if planned.get(key, digest) != digest:
            what = "reward model" if key.endswith(".path") else "file"
            report.warning("reward", f"the {what} of {key} has changed since the training")


def _report_failures(failures: Sequence[RewardFailure], report: Reporter) -> None:
    for failure in failures[:_SHOWN_FAILURES]:
        report.warning("reward", f"a reward failed: {failure}")
    if len(failures) > _SHOWN_FAILURES:
        report.warning("reward", f"{len(failures) - _SHOWN_FAILURES} more failed")


def _lines(group: AnswerGroup) -> Iterator[Mapping[str, object]]:
    """The answers to a prompt as lines of a file."""
    for number, answer in enumerate(group.answers):
        yield {
            "row": group.row,
            "prompt": group.record["prompt"],
            "number": number,
            "answer": answer.text,
            "tokens": answer.written,
            "turns": answer.turns,
            "stop": "length" if answer.is_truncated else "stop",
            "reward": answer.reward,
            "rewards": answer.rewards,
        }
