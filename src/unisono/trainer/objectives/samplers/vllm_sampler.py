"""A vLLM server as the sampler. It gets each version of the weights as a LoRA adapter, which it
reads from a directory of the run.

Rank 0 writes and loads a version, while the others wait in the sum after it; every rank
requests the answers to its own prompts. A rank that finds the server restarted loads the present
version again, whichever it is: rank 0 may already wait for the others.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeVar

import torch

from unisono.base.causes import Verdict
from unisono.base.errors import ConfigError
from unisono.base.files import make_private_dir
from unisono.base.text import parse_seconds, show_seconds
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import SourceRank, StopRequested
from unisono.trainer.batches.table import TableSource
from unisono.trainer.model.engine import GeneratedAnswer
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.agreement import bytes_of_rank, sum_or_fail
from unisono.trainer.objectives.sampled import rows_of
from unisono.trainer.objectives.samplers.http_client import Reply
from unisono.trainer.objectives.samplers.probe import Probe, ProbeAnswer, is_same, judge
from unisono.trainer.objectives.samplers.sampler import EndTokens
from unisono.trainer.objectives.samplers.vllm_checks import HOW, client_of, not_there, refuse_other_model
from unisono.trainer.objectives.samplers.vllm_server import (
    BadAnswer,
    SamplingRequest,
    ServerAnswer,
    ServerAway,
    ServerRefused,
    VllmServer,
)
from unisono.trainer.objectives.samplers.vllm_verdicts import sampler_verdict, verdict_on
from unisono.trainer.plan.task_requests import SamplingParams

FOLDER = "sampler"
_PROBE_PROMPTS, _PROBE_TOKENS = 8, 8
_KEPT_PROBES = 8  # of versions before
_LOOK_S = 3.0  # between looks whether the server lives, while it samples
_RETRY_S = 1.0
_TICK_S = 0.5
T = TypeVar("T")


class _Failed(Exception):  # noqa: N818 - named for what happened
    """This rank cannot sample.

    Attributes:
        verdict: why.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.summary)
        self.verdict = verdict


@dataclass(eq=False)
class _PromptAnswers:
    """The answers to one prompt, and the request for them."""

    answers: list[GeneratedAnswer]
    request: SamplingRequest

    def take(self, served: Sequence[ServerAnswer]) -> None:
        """Completes the answers."""
        for answer, one in zip(self.answers, served, strict=True):
            answer.log_probs, answer.ended = list(one.log_probs), one.ended
            answer.stop_token = one.tokens[-1] if one.ended == "stop" else None
            answer.tokens = one.tokens[:-1] if one.ended == "stop" else list(one.tokens)


def _probe_prompts(prompts: TableSource, *, most_tokens: int) -> list[list[int]]:
    """The shortest prompts of the table, together not longer than a row may be: their forward needs
    no more memory than a step.
    """
    table = prompts.rows.table
    shortest = table.row_lengths().argsort(kind="stable")[:_PROBE_PROMPTS].tolist()
    rows = [table.row(unit)[0].tolist() for unit in shortest]
    sums = list(accumulate(map(len, rows)))
    return [row for row, tokens in zip(rows, sums, strict=True) if tokens <= most_tokens] or rows[:1]


class VllmSampler:
    """See `sampler.AnswerSampler`."""

    def __init__(self, forward: Forward, rank: SourceRank, prompts: TableSource, ends: EndTokens) -> None:
        """A sampler whose server has been checked. All ranks must call it.

        Raises:
            ConfigError: on rank 0, if the server cannot sample for this run.
        """
        plan = rank.plan
        self._forward, self._rank, self._ends = forward, rank, ends
        self._section = plan.config.rollout
        self._patience_s = parse_seconds(self._section.patience)
        self._phase, self._done = "sync", 0
        self._may_stop = False  # before the first version, and once a stop request was seen
        self._away_since: float | None = None
        self._prefix = f"unisono-{plan.run_id}-"
        self._folder = rank.directory / FOLDER
        self._version, self._sync_s = -1, 0.0
        self._name = ""  # of the adapter that samples
        self._answers: list[ProbeAnswer] = []  # of the present version
        self._earlier: list[Probe] = []
        self._client = client_of(self._section)
        self._server = VllmServer(
            self._client,
            answer_s=self._patience_s,
            vocabulary=forward.loaded.base.get_input_embeddings().weight.shape[0],
            on_wait=self._tick,
        )
        self._prompts = _probe_prompts(prompts, most_tokens=plan.config.data.max_length)
        try:
            self._check_model()
        except BaseException:  # also Ctrl-C: its threads would keep the process
            self._client.close()
            raise

    # ---- before the first step

    def _check_model(self) -> None:
        """Compares the served base model with that of the run, and loads an adapter once. All ranks
        must call it.
        """
        self._rank.enter("sync")
        base: list[ProbeAnswer] = []
        if self._rank.rank == 0:
            self._refusing(self._clean_up, HOW)
            base = self._refusing(lambda: self._ask(self._server.models().name), HOW)
        # The first forward has the adapter: sharded parameters keep requires_grad of then, and
        # peft takes it away where the adapter is off.
        base = self._with_both(self._shared(base, None))
        if self._rank.rank == 0 and not self._forward.loaded.base_changes:
            refuse_other_model(self._rank.plan, base)
        name = self._prefix + "check"
        self._write("check")
        if self._rank.rank == 0:
            fix = f"it must see {self._folder}, and take adapters of this kind and rank: {HOW}"
            self._refusing(lambda: self._load(name), fix)
            self._refusing(lambda: self._drop(name), fix)

    def _refusing(self, action: Callable[[], T], fix: str) -> T:
        """The result of an action; what the server refuses is an error of the config."""
        try:
            return action()
        except ServerAway as error:
            raise not_there(self._section, str(error)) from None
        except (ServerRefused, BadAnswer) as error:
            raise ConfigError.of(
                f"the server {self._section.url} cannot sample for this run",
                where="rollout.url",
                why=str(error),
                fix=fix,
            ) from None

    def _clean_up(self) -> None:
        """Unloads what an earlier start of this run has left."""
        for name in sorted(self._server.models().adapters):
            if name.startswith(self._prefix):
                self._server.unload(name)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    # ---- a version

    def with_weights(self, version: int, use: Callable[[], T]) -> T:
        """The result of `use`, after the server has loaded the present adapter."""
        if version != self._version:
            self._sync(version)
        return use()

    def _sync(self, version: int) -> None:
        """Writes the present adapter, lets the server load it, and compares both sides. All ranks
        must call it.
        """
        began = time.perf_counter()
        self._phase, self._done, self._may_stop = "sync", 0, True
        self._rank.enter("sync")
        older, self._name = self._name, f"{self._prefix}{version}"
        self._write(str(version))
        answers: list[ProbeAnswer] = []
        verdict, is_cut_short = None, False
        if self._rank.rank == 0:
            try:
                self._persist(self._load_present)
                answers = self._persist(lambda: self._ask(self._name))
                self._persist(lambda: self._drop(older))
            except _Failed as error:
                verdict = error.verdict
            except StopRequested:
                is_cut_short = True
        self._answers = self._with_both(self._shared(answers, verdict, is_cut_short=is_cut_short))
        self._version = version
        probe = Probe(version, self._answers)
        dtype, finding = self._rank.plan.dtype, None
        if self._rank.rank == 0:
            finding = judge(probe, self._earlier, dtype=dtype)
        if finding is not None:
            verdict = verdict_on(finding, probe, server=self._section.url or "", name=self._name, dtype=dtype)
        sum_or_fail(self._rank, [], verdict)
        self._earlier = [*self._earlier, probe][-_KEPT_PROBES:]
        self._sync_s = time.perf_counter() - began

    def _write(self, version: str) -> None:
        """Writes the present adapter; ranks with sharded weights take part."""
        directory = self._folder / (self._prefix + version)
        if self._rank.rank == 0:
            make_private_dir(self._folder)
            shutil.rmtree(directory, ignore_errors=True)
        self._rank.write_adapter(directory if self._rank.rank == 0 else None)

    def _load_present(self) -> None:
        if self._name not in self._server.models().adapters:
            self._load(self._name)

    def _load(self, name: str) -> None:
        try:
            self._server.load(name, str((self._folder / name).absolute()))
        except ServerRefused:
            # Another rank may have loaded it at the same time.
            if name not in self._server.models().adapters:
                raise

    def _drop(self, name: str) -> None:
        """Unloads an adapter, and removes its files."""
        if name:
            self._server.unload(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)

    # ---- the probe

    def _ask(self, model: str) -> list[ProbeAnswer]:
        """The server's short answers to the same prompts, with the same random numbers."""
        request = SamplingRequest(
            model=model,
            prompts=self._prompts,
            number=1,
            max_tokens=min(_PROBE_TOKENS, self._section.max_new_tokens),
            sampling=SamplingParams(
                temperature=self._section.temperature,
                top_p=self._section.top_p,
                top_k=self._section.top_k,
                seed=stream_seed(self._rank.plan.config.seed, "probe") >> 1,
            ),
            stop_ids=frozenset(),
        )
        return [ProbeAnswer(one.tokens, one.log_probs, ()) for one in self._server.complete(request)]

    def _shared(
        self, answers: Sequence[ProbeAnswer], verdict: Verdict | None, *, is_cut_short: bool = False
    ) -> list[ProbeAnswer]:
        """The answers that rank 0 got, on all ranks, which must all call it; see `sum_or_fail`."""
        rank = self._rank
        data = json.dumps([[list(one.tokens), list(one.served)] for one in answers]).encode()
        (size,) = sum_or_fail(rank, [len(data) if rank.rank == 0 else 0], verdict, is_cut_short=is_cut_short)
        pairs = json.loads(bytes_of_rank(rank, 0, data, size=int(size)))
        return [ProbeAnswer(tokens, served, ()) for tokens, served in pairs]

    def _with_both(self, answers: Sequence[ProbeAnswer]) -> list[ProbeAnswer]:
        """With the log-probabilities here, with and without the adapter. With sharded weights all
        ranks must call it.
        """
        expected = self._log_probs(answers)
        bare = self._with_bare(answers) if not self._forward.loaded.base_changes else answers
        return [
            ProbeAnswer(one.tokens, one.served, values, other.bare)
            for one, values, other in zip(answers, expected, bare, strict=True)
        ]

    def _with_bare(self, answers: Sequence[ProbeAnswer]) -> list[ProbeAnswer]:
        with self._forward.without_adapter():
            values = self._log_probs(answers)
        return [
            ProbeAnswer(one.tokens, one.served, one.expected, bare)
            for one, bare in zip(answers, values, strict=True)
        ]

    def _log_probs(self, answers: Sequence[ProbeAnswer]) -> list[list[float]]:
        """Those that the present weights give to the tokens of each answer."""
        pairs = [(prompt, one.tokens) for prompt, one in zip(self._prompts, answers, strict=True)]
        with torch.no_grad():
            values = self._forward.log_probs(
                rows_of(pairs, self._rank.device), temperature=self._section.temperature
            )
        return [part.tolist() for part in values.split([len(one.tokens) for one in answers])]

    def figures(self) -> dict[str, float]:
        """Seconds until the version could sample, and how far its log-probabilities on the server
        are from those here.
        """
        return {"sync_time_s": self._sync_s, "sync_difference": Probe(self._version, self._answers).distance}

    # ---- answers

    def sample(self, answers: Sequence[GeneratedAnswer]) -> Verdict | None:
        """Completes answers."""
        self._phase, self._done = "rollout", 0
        missing = [
            self._group(list(group))
            for _, group in groupby(answers, key=lambda one: (one.sampling, id(one.prompt)))
        ]
        try:
            self._persist(lambda: self._sample(missing))
        except _Failed as error:
            return error.verdict
        return None

    def _group(self, answers: list[GeneratedAnswer]) -> _PromptAnswers:
        first = answers[0]
        sampling = first.sampling
        return _PromptAnswers(
            answers,
            SamplingRequest(
                model=self._name,
                prompts=[first.prompt],
                number=len(answers),
                max_tokens=first.max_new_tokens,
                sampling=SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=sampling.seed >> 1,  # the server adds the number of the answer
                ),
                stop_ids=self._ends.stop_ids,
            ),
        )

    def _sample(self, missing: list[_PromptAnswers]) -> None:
        """Requests what is missing, and takes away from `missing` what has arrived.

        Raises:
            ServerAway: if something is still missing.
        """
        waiting = {self._server.start(group.request): group for group in missing}
        try:
            self._await(waiting, missing)
        except StopRequested:
            self._server.abort(list(waiting))
            raise

    def _await(self, waiting: dict[Future[Reply], _PromptAnswers], missing: list[_PromptAnswers]) -> None:
        look, looked, away = None, time.monotonic(), None
        while waiting:
            for future in wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED).done:
                try:
                    self._take(waiting.pop(future), future, missing)
                except ServerAway as error:
                    away = error
            self._tick()
            try:
                if look is not None and look.done():
                    self._server.lives(look)
                    look, looked = None, time.monotonic()
            except ServerAway as error:
                away = error
                self._server.abort(list(waiting))
            if look is None and time.monotonic() - looked > _LOOK_S:
                look = self._server.start_look()
        if away is not None:
            raise away

    def _take(self, group: _PromptAnswers, future: Future[Reply], missing: list[_PromptAnswers]) -> None:
        group.take(self._server.answers(group.request, future))
        missing.remove(group)
        self._away_since = None

    # ---- patience

    def _persist(self, action: Callable[[], T]) -> T:
        """The result of an action, which is repeated as long as a server that went away is waited
        for.

        Raises:
            _Failed: with the verdict, if that takes too long, or the server refuses.
        """
        while True:
            try:
                if self._away_since is not None:
                    self._restore()
                result = action()
            except ServerAway as error:
                self._wait(error)
            except ServerRefused as error:
                what = "the adapter" if self._phase == "sync" else "to sample"
                raise self._failed(
                    "sampler_mismatch", f"the server {self._section.url} refuses {what}: {error}"
                ) from None
            except BadAnswer as error:
                raise self._failed(
                    "sampler_mismatch",
                    f"the server {self._section.url} returns what is not an answer of the model: {error}",
                ) from None
            else:
                self._away_since = None
                return result

    def _wait(self, error: ServerAway) -> None:
        """Waits a moment for a server that went away.

        Raises:
            _Failed: if it has been waited for long enough.
        """
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now - error.waited_s
            self._rank.warn(
                "sampler_away",
                f"waiting for the server {self._section.url}, up to {self._section.patience}: {error}",
                fix="start it again if it is down",
            )
        away = show_seconds(now - self._away_since)
        self._rank.show(self._phase, f"waiting for the server {self._section.url} for {away}: {error}")
        if now - self._away_since > self._patience_s:
            raise self._failed(
                "sampler_unreachable",
                f"the server {self._section.url}, which samples version {self._name.rpartition('-')[2]}, has not"
                f" answered for {away} (rollout.patience is {self._section.patience}): {error}",
            )
        self._server.pause(_RETRY_S)

    def _restore(self) -> None:
        """Lets a server that is back load the present version again, if it has lost it, and checks
        it.
        """
        if self._name not in self._server.models().adapters:
            self._load(self._name)
            # In a sync the probe comes next.
            if self._phase != "sync" and not is_same(
                self._answers, self._ask(self._name), dtype=self._rank.plan.dtype
            ):
                raise BadAnswer(f"after its restart, {self._name} gives different answers than before")
        self._rank.show(self._phase, f"the server {self._section.url} is back")

    def _tick(self) -> None:
        """Tells the watch that this rank lives: each request has a deadline, so waiting is
        progress.
        """
        self._done += 1
        self._rank.enter(self._phase, done=self._done)
        if self._may_stop:
            try:
                self._rank.end_if_stopped()
            except StopRequested:
                self._may_stop = False  # what follows, e.g. the end of requests, is not cut short
                raise

    def _failed(self, cause: str, summary: str) -> _Failed:
        return _Failed(sampler_verdict(cause, summary, phase=self._phase))

    def close(self) -> None:
        """Unloads the present version, if the server answers at once, and removes its files."""
        if self._rank.rank == 0 and self._name and self._away_since is None:
            with suppress(ServerAway, ServerRefused, BadAnswer, OSError):
                self._server.unload(self._name)
        if self._rank.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._client.close()
