"""Answers that the model samples during the run, with their rewards and advantages, as a source of
batches.

A rollout has the answers to the prompts of `rollout.steps` optimizer steps, a group of
`rollout.group` for each prompt. It is sampled before the first of these steps. Which rank samples
what follows from the prompts alone, so all ranks know it before anything is sampled; a group stays
on its rank. Random numbers are keyed by the seed, the place of the prompt in the endless order, and
the number of the answer.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from unisono.base.causes import Verdict
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import (
    BatchSource,
    Counts,
    Micro,
    MicroBatch,
    SourceRank,
    StepBatches,
    StopRequested,
    agree_on,
)
from unisono.trainer.batches.table import EvaluationRows, TableSource
from unisono.trainer.config.answer_functions import function_names
from unisono.trainer.model.engine import GeneratedAnswer
from unisono.trainer.model.forward import Forward, PictureInputs, Rows
from unisono.trainer.objectives.advantages import RewardSums, group_advantages, is_equal, penalize
from unisono.trainer.objectives.agreement import sum_or_fail
from unisono.trainer.objectives.environments.episodes import EpisodePlayer
from unisono.trainer.objectives.rewards.calls import RewardError
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.objectives.rollout_files import note_failures, read_rollout, write_rollout
from unisono.trainer.objectives.sampled import AnswerGroup, SampledAnswer, rows_of
from unisono.trainer.objectives.samplers.sampler import AnswerSampler, EndTokens
from unisono.trainer.plan import deal
from unisono.trainer.plan.task_requests import SamplingParams


@dataclass
class _Times:
    """Seconds of this rank for a rollout."""

    sample_s: float
    reward_s: float


class RolloutSource(BatchSource):
    """The sampled answers to the prompts of a table."""

    measures = True

    def __init__(
        self,
        prompts: TableSource,
        forward: Forward,
        rank: SourceRank,
        rewards: RewardPool,
        sampler: AnswerSampler,
        player: EpisodePlayer | None = None,
        reference: Forward | None = None,
    ) -> None:
        """Nothing is sampled yet.

        Args:
            prompts: of all steps.
            forward: the model.
            rank: this rank.
            rewards: a pool that was started; `close` closes it.
            sampler: of the answers; `close` closes it.
            player: of the environment in which the model acts; `close` closes it. None: answers
                have one turn.
            reference: a model of its own; None: there is none, or it is the one without its
                adapter.
        """
        config = rank.plan.config
        self._reference = reference
        self._prompts, self._rank, self._rewards, self._sampler = prompts, rank, rewards, sampler
        self._player = player
        self._tokenizer = forward.loaded.tokenizer
        self._section, self._grpo, self._seed = config.rollout, config.grpo, config.seed
        of_environment = [] if player is None or player.reward_name is None else [player.reward_name]
        self._names = [*function_names(config.rewards), *of_environment]
        self._groups: dict[int, list[AnswerGroup]] = {}  # by step, those of the present rollout
        self._times = _Times(0.0, 0.0)
        self._ends = EndTokens.of(prompts, forward)
        self._version = 0 if rank.plan.resume is None else rank.plan.resume.step  # of the weights, in steps

    def step(self, step: int) -> StepBatches:
        """The answers of a step, which are sampled if it is the first of a rollout."""
        self._version = step - 1
        if step not in self._groups:
            self._groups = self._rollout_of(step)
        self._version = step  # of the weights at the next call
        groups = self._groups[step]
        answers = [answer for group in groups for answer in group.answers]
        micros = self._micros(groups)
        counts = Counts(
            units=len(answers),
            loss_tokens=sum(answer.written for answer in answers if answer.has_loss),
            first_tokens=sum(len(answer.prompt) + len(answer.tokens) for answer in answers),
        )
        sequences = self._prompts.sequences(step)
        batches = StepBatches(step, sequences, micros, len(micros), counts.first_tokens, counts)
        figures = {"sample_time_s": self._times.sample_s, "reward_time_s": self._times.reward_s}
        self._times = _Times(0.0, 0.0)
        figures = answer_figures(groups, self._names, self._rank) | figures | self._sampler.figures()
        return replace(agree_on(batches, self._rank, self._rank.device), figures=figures)

    # ---- a rollout

    def _rollout_of(self, step: int) -> dict[int, list[AnswerGroup]]:
        """The groups of this rank by step, of the rollout that a step belongs to."""
        first = step - (step - 1) % self._section.steps
        steps = range(first, min(first + self._section.steps, self._rank.plan.total_steps + 1))
        groups = {one: self._groups_of_rank(one) for one in steps if one >= step}
        mine = [group for of_step in groups.values() for group in of_step]
        if step != first:  # the run was resumed within a rollout, whose answers are on disk
            if read_rollout(self._rank.directory, range(first, step + 1), mine, self._draw):
                return groups
            first = step  # its last step was the one before: it has been extended since
        self._times = _Times(0.0, 0.0)
        replaced: list[AnswerGroup] = []
        sums = self._agree(mine, *self._within_weights(lambda: self._answer(mine, replaced)))
        self._set_advantages(mine, sums)
        self._set_advantages(replaced, sums)
        written = sorted([*mine, *replaced], key=lambda group: (group.place, group.draw))
        write_rollout(self._rank.directory, first, written, rank=self._rank.rank, ranks=self._rank.world_size)
        return groups

    def _within_weights(self, work: Callable[[], Verdict | None]) -> tuple[Verdict | None, bool]:
        """What `work` gives, which may sample, and whether a stop request has cut it short."""

        def until_stopped() -> tuple[Verdict | None, bool]:
            try:
                return work(), False
            except StopRequested:
                return None, True

        return self._sampler.with_weights(self._version, until_stopped)

    def _answer(self, groups: Sequence[AnswerGroup], replaced: list[AnswerGroup]) -> Verdict | None:
        """Samples and scores answers; or what has failed, if the run ends then.

        Groups with equal rewards get another prompt, up to `rollout.resample` times, and
        `replaced` what they were before.
        """
        verdict = self._sample(groups) or self._score(groups)
        for draw in range(1, 1 + self._section.resample):
            equal = [group for group in groups if is_equal(self._rewards_of(group))]
            if verdict is not None or not equal:
                break
            replaced += [replace(group, is_replaced=True) for group in equal]
            for group in equal:
                self._draw(group, draw)
            verdict = self._sample(equal) or self._score(equal)
        return verdict

    def _draw(self, group: AnswerGroup, draw: int) -> None:
        """Gives a group another prompt of the table; which one follows from the seed, its place and
        the number of the draw.
        """
        prompts, table = self._prompts, self._prompts.rows.table
        number = stream_seed(self._seed, _stream("resample", draw), group.place)
        group.sequence = number % len(table.sequence_tokens())
        (unit,) = prompts.rows.units_of([group.sequence])
        group.draw, group.answers = draw, []
        group.row, group.prompt = table.row_id(unit), table.row(unit)[0].tolist()
        group.stored = int(table.columns["stored"][unit])
        group.record = table.record(unit)

    def _groups_of_rank(self, step: int) -> list[AnswerGroup]:
        """The prompts of a step that this rank answers, in order; all ranks call it alike."""
        prompts, table = self._prompts, self._prompts.rows.table
        sequences = prompts.sequences(step)
        tokens = prompts.rows.table.sequence_tokens()[sequences].tolist()
        share = deal(tokens, ranks=prompts.dp_size)[prompts.dp_rank]
        first = (step - 1) * prompts.global_batch
        groups = []
        for index in share:
            (unit,) = prompts.rows.units_of([sequences[index]])
            groups.append(
                AnswerGroup(
                    step=step,
                    place=first + index,
                    sequence=sequences[index],
                    row=table.row_id(unit),
                    prompt=table.row(unit)[0].tolist(),
                    record=table.record(unit),
                    stored=int(table.columns["stored"][unit]),
                )
            )
        return groups

    def _pictures(self, groups: Sequence[AnswerGroup]) -> PictureInputs | None:
        """The pictures of prompts, in order; None without any."""
        contents = self._prompts.rows.contents
        if contents is None:
            return None
        seen = contents.loader.load([group.stored for group in groups], [], [])
        assert seen is None or isinstance(seen, PictureInputs)
        return seen

    def _sample(self, groups: Sequence[AnswerGroup], *, greedy: bool = False) -> Verdict | None:
        """Samples the answers of some groups with the present weights; or why it cannot."""
        began = time.perf_counter()
        play = self._write_answers if self._player is None else partial(self._play, self._player)
        verdict = play(groups, greedy=greedy)
        if verdict is None:
            self._times.sample_s += time.perf_counter() - began
        return verdict

    def _write_answers(self, groups: Sequence[AnswerGroup], *, greedy: bool) -> Verdict | None:
        """Answers of one turn."""
        size = 1 if greedy else self._section.group
        waiting: list[tuple[AnswerGroup, list[GeneratedAnswer]]] = []
        for group in groups:
            seed = stream_seed(self._seed, _stream("rollout", group.draw), group.place)
            sampling, most = self._sampling(seed, greedy=greedy), self._section.max_new_tokens
            pictures = self._pictures([group])
            answers = [
                GeneratedAnswer(group.prompt, most, sampling, place=number, pictures=pictures)
                for number in range(size)
            ]
            waiting.append((group, answers))
        verdict = self._sampler.sample([one for _, of in waiting for one in of])
        if verdict is not None:
            return verdict
        for group, answers in waiting:
            group.answers = [SampledAnswer.of(group.prompt, one, self._tokenizer) for one in answers]
        return None

    def _play(self, player: EpisodePlayer, groups: Sequence[AnswerGroup], *, greedy: bool) -> Verdict | None:
        """Answers of several turns."""

        def seed_of(group: AnswerGroup, number: int, turn: str) -> int:
            name = _stream(f"rollout, {turn}", group.draw)
            return stream_seed(self._seed, name, group.place * self._section.group + number)

        verdict = player.play(
            groups,
            size=1 if greedy else self._section.group,
            seed_of=lambda group, number: seed_of(group, number, "environment"),
            sampling_of=lambda group, number, turn: self._sampling(
                seed_of(group, number, f"turn {turn}"), greedy=greedy
            ),
            sample=self._sampler.sample,
            ranks=[self._rank.rank],
        )
        note_failures(self._rank.directory, player.take_failures())
        return verdict

    def _sampling(self, seed: int, *, greedy: bool) -> SamplingParams:
        section = self._section
        temperature = 0.0 if greedy else section.temperature
        return SamplingParams(temperature, section.top_p, section.top_k, seed=seed)

    def _score(self, groups: Sequence[AnswerGroup]) -> Verdict | None:
        """Gives all answers their rewards; or what has failed, if the run ends then."""
        began = time.perf_counter()
        self._rank.enter("reward", total=len(groups))
        calls = [group.call() for group in groups]
        try:
            scored = self._rewards.score(calls)
        except RewardError as error:
            note_failures(self._rank.directory, error.failures)
            return verdict_on(error.failure, self._rank.rank)
        note_failures(self._rank.directory, [failure for scores in scored for failure in scores.failures])
        for group, scores in zip(groups, scored, strict=True):
            group.take(scores)
        self._times.reward_s += time.perf_counter() - began
        return None

    def _agree(
        self,
        groups: Sequence[AnswerGroup],
        verdict: Verdict | None,
        is_cut_short: bool,  # noqa: FBT001 - the pair that `_within_weights` gives
    ) -> RewardSums:
        """The sums of all rewards of the rollout. All ranks must call it.

        Raises:
            SourceFailed: on all ranks, if sampling or a reward failed on any.
            SourceStopped: on all ranks, if a stop request has cut any of them short.
        """
        sums = RewardSums.of([answer.reward for group in groups for answer in group.answers])
        figures = [sums.count, sums.total, sums.squares]
        return RewardSums(*sum_or_fail(self._rank, figures, verdict, is_cut_short=is_cut_short))

    def _set_advantages(self, groups: Sequence[AnswerGroup], sums: RewardSums) -> None:
        section = self._grpo
        automatic: Literal["group", "none"] = "none" if section.loss == "rloo" else "group"
        scale = automatic if section.scale == "auto" else section.scale
        for group in groups:
            rewards = self._rewards_of(group)
            advantages = group_advantages(
                rewards,
                scale=scale,
                batch_std=sums.std,
                leave_one_out=section.loss == "rloo",
            )
            group.is_equal = is_equal(rewards)
            for answer, advantage in zip(group.answers, advantages, strict=True):
                answer.advantage = advantage or 0.0
                is_masked = section.truncated == "mask" and answer.is_truncated
                answer.has_loss = advantage is not None and not is_masked and not group.is_replaced

    def _rewards_of(self, group: AnswerGroup) -> Sequence[float | None]:
        """The rewards that are compared."""
        rewards = [answer.reward for answer in group.answers]
        if self._grpo.truncated != "penalize":
            return rewards
        return penalize(rewards, [answer.is_truncated for answer in group.answers])

    # ---- batches

    def _micros(self, groups: Sequence[AnswerGroup]) -> list[MicroBatch]:
        """Those of the answers that have a part in the gradient, and at least one if the rank has
        any.
        """
        all_units = [(group, number) for group in groups for number in range(len(group.answers))]
        units = [one for one in all_units if self._has_gradient(one[0].answers[one[1]])]
        # An answer whose environment failed at its beginning has no tokens.
        units = units or [one for one in all_units if one[0].answers[one[1]].written][:1]
        size = self._prompts.micro_batch
        return [self._micro(units[i : i + size]) for i in range(0, len(units), size)]

    def _has_gradient(self, answer: SampledAnswer) -> bool:
        return answer.has_loss and answer.written > 0 and (answer.advantage != 0 or self._grpo.beta > 0)

    def _micro(self, units: Sequence[tuple[AnswerGroup, int]]) -> MicroBatch:
        return MicroBatch(
            [group.sequence for group, _ in units],
            [group.place * self._section.group + number for group, number in units],
            [1] * len(units),
            lambda sides: self._load(units),
        )

    def _load(self, units: Sequence[tuple[AnswerGroup, int]]) -> Micro:
        answers = [group.answers[number] for group, number in units]
        device = self._rank.device
        columns = {
            "advantage": torch.tensor([answer.advantage for answer in answers], device=device),
            "has_loss": torch.tensor([answer.has_loss for answer in answers], device=device),
            "sampled": torch.tensor([p for answer in answers for p in answer.log_probs], device=device),
        }
        rows = rows_of(
            [(answer.prompt, answer.tokens) for answer in answers],
            device,
            is_sampled=[answer.is_sampled for answer in answers],
        )
        rows = replace(self._readable(rows), pictures=self._pictures([group for group, _ in units]))
        if self._reference is not None:
            with torch.no_grad():
                temperature = self._section.temperature
                columns["reference"] = self._reference.log_probs(rows, temperature=temperature)
        return Micro(rows, len(units), [group.row for group, _ in units], columns)

    def _readable(self, rows: Rows) -> Rows:
        """The rows with other tokens where an answer ends with one of a picture: it is predicted
        there, and nothing follows it.
        """
        if not self._ends.of_pictures:
            return rows
        ids = torch.tensor(sorted(self._ends.of_pictures), device=rows.labels.device)
        input_ids = rows.input_ids.clone()
        input_ids[rows.label_index[torch.isin(rows.labels, ids)] + 1] = self._ends.pad_id
        return replace(rows, input_ids=input_ids)

    def longest(self, sides: Sequence[int], *, padded: bool = False) -> MicroBatch:
        """Answers as long as they may be, to the longest prompt."""
        del sides, padded
        return self._made_up(self._prompts.micro_batch, longest=True)

    def shortest(self) -> MicroBatch:
        """An answer of one token to the shortest prompt."""
        return self._made_up(1, longest=False)

    def _made_up(self, count: int, *, longest: bool) -> MicroBatch:
        """A micro batch of answers that were not sampled."""
        table = self._prompts.rows.table
        lengths = table.row_lengths()
        unit = int(lengths.argmax() if longest else lengths.argmin())
        tokens = [self._ends.pad_id] * (self._section.max_new_tokens if longest else 1)
        prompt = table.row(unit)[0].tolist()
        if longest and self._player is not None:  # an environment may make it as long as that
            prompt += [self._ends.pad_id] * (self._player.most_prompt - len(prompt))
        answer = SampledAnswer(prompt, tokens, [-1.0] * len(tokens), "", is_truncated=False, reward=0.0)
        stored = int(table.columns["stored"][unit])
        group = AnswerGroup(
            0, 0, unit, table.row_id(unit), prompt, {}, answers=[answer] * count, stored=stored
        )
        return self._micro([(group, number) for number in range(count)])

    def close(self) -> None:
        """Ends the processes of rewards and of the environment, and the sampler."""
        self._rewards.close()
        self._sampler.close()
        if self._player is not None:
            self._player.close()

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the prompts of some sequences."""
        return self._prompts.row_ids(sequences)

    def examples(self) -> list[list[int]]:
        """Three prompts."""
        return self._prompts.examples()

    def measure(self, evaluation: object) -> Mapping[str, float]:
        """The mean reward of the likeliest answer to each prompt, and the mean length of these
        answers. All ranks must call it.

        Raises:
            SourceStopped: on all ranks, if a stop request came meanwhile.
        """
        assert isinstance(evaluation, EvaluationRows)
        table, rank = evaluation.rows.table, self._rank
        units = range(table.rows)[rank.rank :: rank.world_size]
        groups = [
            AnswerGroup(
                0,
                unit,
                unit,
                table.row_id(unit),
                table.row(unit)[0].tolist(),
                table.record(unit),
                stored=int(table.columns["stored"][unit]),
            )
            for unit in units
        ]
        done = self._within_weights(lambda: self._sample(groups, greedy=True) or self._score(groups))
        self._agree(groups, *done)
        answers = [group.answers[0] for group in groups]
        scored = [answer.reward for answer in answers if answer.reward is not None]
        sums = [sum(scored), len(scored), sum(answer.written for answer in answers), len(answers)]
        summed = torch.tensor(sums, dtype=torch.float64, device=rank.device)
        rank.sum(summed)
        total, count, tokens, number = rank.figures(summed)
        self._times = _Times(0.0, 0.0)
        return {"reward": total / count if count else 0.0, "answer_tokens": tokens / max(1, number)}


def answer_figures(groups: Sequence[AnswerGroup], names: Sequence[str], rank: SourceRank) -> dict[str, float]:
    """Figures of the answers of a step on all ranks, which must all call it: the mean reward and
    that of each function, tokens of an answer, the entropy, and shares: of truncated answers, of
    those in groups with equal rewards or equal answers, of those to another prompt than the first,
    and of those that have left their group.

    The entropy, in nats per token, is estimated by the sampled tokens: the mean of -log p.
    """
    answers = [(group, answer) for group in groups for answer in group.answers]
    values: dict[str, list[float]] = {
        "reward": [answer.reward for _, answer in answers if answer.reward is not None],
        "answer_tokens": [float(answer.written) for _, answer in answers],
        "truncated": [float(answer.is_truncated) for _, answer in answers],
        "equal_groups": [float(group.is_equal) for group, _ in answers],
        "same_answers": [float(group.is_same) for group, _ in answers],
        "entropy": [-value for _, answer in answers for value in answer.log_probs],
        "resampled": [float(group.draw > 0) for group, _ in answers],
        "no_reward": [float(answer.reward is None) for _, answer in answers],
    }
    if any(answer.messages is not None for _, answer in answers):
        values["turns"] = [float(answer.turns) for _, answer in answers]
        values["refused_calls"] = [float(answer.refused_calls) for _, answer in answers]
    if len(names) > 1:
        for name in names:
            given = [answer.rewards.get(name) for _, answer in answers]
            values[f"reward_{name}"] = [value for value in given if value is not None]
    sums = [figure for column in values.values() for figure in (math.fsum(column), len(column))]
    summed = torch.tensor(sums, dtype=torch.float64, device=rank.device)
    rank.sum(summed)
    totals = rank.figures(summed)
    return {
        name: total / count
        for name, total, count in zip(values, totals[::2], totals[1::2], strict=True)
        if count and (name not in ("no_reward", "resampled") or total)
    }


def _stream(name: str, draw: int) -> str:
    """The name of a random stream of a group's prompt or answers."""
    return f"{name} {draw}" if draw else name
