"""Fits the weights of `unisono diagnose`'s hypotheses on cases, and measures ranking and
calibration by cross-validation.

    cd tests/guard/diagnosis/reports
    python ../../../../scripts/fit_hypotheses.py read.jsonl began.jsonl daily.jsonl kept_daily.jsonl threads.jsonl
    --kept kept.jsonl threads.jsonl [--no-failure no_failure.jsonl] [--write]

A case is a line of JSON: `files` (name -> text), `cause`, `also_accept`, and in a file for both
purposes its `half`, "fit" or "kept". The weights of the catalogue are the prior mean: a penalized softmax regression corrects them only where cases say so,
and changes no sign (Gaussian prior, maximum a posteriori).
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from unisono.base.causes.signatures import match_line
from unisono.guard.diagnosis.hypotheses import DENIED_SHARE, NO_FAILURE, Table, make_table
from unisono.guard.diagnosis.judge import CERTAIN, DiagnosisResult
from unisono.guard.diagnosis.reading import diagnose_logs, find_sources, read_all

FOLDS = 5
PENALTY, PRIOR_PENALTY = 0.5, 2.0
ROUNDS, RATE = 400, 0.05
BINS = 10
_FILE = Path(str(files("unisono.guard.diagnosis"))) / "weights.json"


@dataclass(frozen=True)
class Case:
    """A case with what was read from it."""

    id: str
    cause: str
    accepted: tuple[str, ...]
    language: str
    found: DiagnosisResult
    text: str = ""

    @property
    def features(self) -> list[str]:
        """Their names."""
        return [feature.id for feature in self.found.features]


def read_case(line: str) -> Case:
    """The case of a line."""
    body = json.loads(line)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in body["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8", newline="")
        read = read_all(find_sources([str(Path(folder, name)) for name in sorted(body["files"])]))
        found = diagnose_logs(read.scanned, read.recordings, read.reports)
    accepted = tuple(body.get("also_accept", ()))
    text = "\n".join(body["files"].values())
    return Case(
        body["id"], body.get("cause") or NO_FAILURE, accepted, body.get("language", "en"), found, text
    )


def read_cases(files: Sequence[Path], half: str) -> list[Case]:
    """The cases of some files that are for this purpose."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [read_case(line) for line in lines if json.loads(line).get("half", half) == half]


def read_others(file: Path) -> list[Case]:
    """The texts of a file that report no failure."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()]
        return [
            read_case(line) for line in lines if json.loads(line).get("read", True)
        ]  # the others are for measuring
    return [read_case(json.dumps({"id": file.name, "files": {file.name: text}}))]


@dataclass
class Problem:
    """Cases as matrices: features (cases x features), lines (cases x causes x 4), accepted shares
    (cases x causes).
    """

    causes: list[str]
    names: list[str]
    features: Any
    lines: Any
    accepted: Any


_LINES = ("proved", "suggested", "line", "warning")


def make_problem(cases: Sequence[Case], table: Table) -> Problem:
    """The matrices of some cases."""
    causes = [cause for cause in table.entries if cause != NO_FAILURE]
    names = sorted({name for entry in table.entries.values() for name in entry.weights})
    place, column = ({key: number for number, key in enumerate(keys)} for keys in (causes, names))
    features = np.zeros((len(cases), len(names)))
    lines = np.zeros((len(cases), len(causes), len(_LINES)))
    accepted = np.zeros((len(cases), len(causes)))
    for row, case in enumerate(cases):
        for name in case.features:
            kind, _, cause = name.partition(":")
            if kind in _LINES and cause in place:
                lines[row, place[cause], _LINES.index(kind)] = 1
            elif name in column:
                features[row, column[name]] = 1
            elif kind == "not" and cause in column and not features[row, column[cause]]:
                features[row, column[cause]] = -DENIED_SHARE
        for cause in case.accepted:
            if cause in place:
                accepted[row, place[cause]] = 0.5
        if case.cause in place:
            accepted[row, place[case.cause]] = 1
    return Problem(causes, names, features, lines, accepted)


@dataclass
class Fitted:
    """Numbers of a fit: weights (causes x features), priors (causes), levels of lines."""

    weights: Any
    priors: Any
    levels: Any


def start_of(problem: Problem, table: Table) -> tuple[Fitted, Any]:
    """The numbers of the table, and which weights it has."""
    weights = np.array(
        [[table.entries[cause].weights.get(name, 0.0) for name in problem.names] for cause in problem.causes]
    )
    priors = np.array([table.entries[cause].prior for cause in problem.causes])
    return Fitted(weights, priors, np.array([table.levels[kind] for kind in _LINES])), weights != 0


def probabilities(problem: Problem, fitted: Fitted) -> Any:
    """cases x causes."""
    logits = problem.features @ fitted.weights.T + fitted.priors + problem.lines @ fitted.levels
    logits -= logits.max(axis=1, keepdims=True)
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def fit(problem: Problem, table: Table) -> Fitted:
    """The maximum a posteriori, by gradient ascent with momentum."""
    start, mask = start_of(problem, table)
    now = Fitted(start.weights.copy(), start.priors.copy(), start.levels.copy())
    pace = [np.zeros_like(start.weights), np.zeros_like(start.priors), np.zeros_like(start.levels)]
    for _ in range(ROUNDS):
        chance = probabilities(problem, now)
        right = problem.accepted * chance
        error = right / right.sum(axis=1, keepdims=True).clip(1e-12) - chance
        steps = (
            (error.T @ problem.features - PENALTY * (now.weights - start.weights)) * mask,
            error.sum(axis=0) - PRIOR_PENALTY * (now.priors - start.priors),
            np.einsum("rc,rck->k", error, problem.lines) - PENALTY * (now.levels - start.levels),
        )
        for number, step in enumerate(steps):
            pace[number] = 0.8 * pace[number] + 0.2 * step
        now.weights += RATE * pace[0]
        now.priors += RATE * pace[1]
        now.levels += RATE * pace[2]
        now.weights = np.where(
            mask & (np.sign(now.weights) != np.sign(start.weights)),
            0.05 * np.sign(start.weights),
            now.weights,
        )
    return now


def fit_no_failure(failures: Sequence[Case], others: Sequence[Case], table: Table) -> dict[str, float]:
    """Corrections for the outcome that a text reports no failure: a penalized logistic regression
    of failures against other texts.
    """
    entry = table.entries[NO_FAILURE]
    names = sorted(entry.weights)
    rows = np.array([[float(name in case.features) for name in names] for case in (*failures, *others)])
    is_none = np.array([0.0] * len(failures) + [1.0] * len(others))
    share = np.where(is_none > 0, 0.6 * len(failures) / len(others), 1.0)
    start = np.array([entry.weights[name] for name in names])
    weights, prior = start.copy(), entry.prior
    for _ in range(3000):
        error = share * (is_none - 1 / (1 + np.exp(-(rows @ weights + prior))))
        weights += 0.02 * (rows.T @ error - PENALTY * (weights - start))
        prior += 0.02 * (error.sum() - 0.3 * (prior - entry.prior))
        weights = np.where(np.sign(weights) != np.sign(start), 0.02 * np.sign(start), weights)
    found = {name: round(float(value), 2) for name, value in zip(names, weights - start, strict=True)}
    return {**found, "prior": round(float(prior - entry.prior), 2)}


def folds_of(count: int) -> list[np.ndarray]:
    """The rows of each fold, in a fixed order."""
    order = np.random.default_rng(0).permutation(count)
    return [order[number::FOLDS] for number in range(FOLDS)]


def cross_validated(cases: Sequence[Case], table: Table) -> Any:
    """For each case its probabilities by a fit that has not seen it."""
    problem = make_problem(cases, table)
    found = np.zeros_like(problem.accepted)
    for rows in folds_of(len(cases)):
        rest = np.setdiff1d(np.arange(len(cases)), rows)
        part = make_problem([cases[row] for row in rest], table)
        found[rows] = probabilities(make_problem([cases[row] for row in rows], table), fit(part, table))
    return found


def best_temperature(chances: Any, problem: Problem) -> float:
    """The temperature with the largest likelihood of the accepted causes."""

    def surprise(temperature: float) -> float:
        return float(
            -np.log((tempered(chances, temperature) * (problem.accepted > 0)).sum(axis=1).clip(1e-12)).mean()
        )

    return min((0.6 + 0.05 * number for number in range(40)), key=surprise)


def best_calibration(chances: Any, problem: Problem) -> tuple[float, float]:
    """Slope and shift of the log odds with the largest likelihood (Platt 1999), over all causes
    with a chance of at least 0.02.
    """
    rows = chances >= 0.02
    odds = np.log(chances[rows].clip(1e-9) / (1 - chances[rows]).clip(1e-9)).clip(-8, 8)
    right = (problem.accepted > 0)[rows].astype(float)
    slope, shift = 1.0, 0.0
    for _ in range(4000):
        error = right - 1 / (1 + np.exp(-(slope * odds + shift)))
        slope += 0.5 * float((error * odds).mean()) / 4
        shift += 0.5 * float(error.mean())
    return round(slope, 3), round(shift, 3)


def scaled(chances: Any, slope: float, shift: float) -> Any:
    """Scores for probabilities of the softmax."""
    odds = np.log(chances.clip(1e-12) / (1 - chances).clip(1e-12))
    return 1 / (1 + np.exp(-(slope * odds + shift)))


def tempered(chances: Any, temperature: float) -> Any:
    """Probabilities with their logits divided by a temperature."""
    powers = np.power(chances.clip(1e-12), 1 / temperature)
    return powers / powers.sum(axis=1, keepdims=True)


def calibration(chances: Any, problem: Problem) -> dict[str, Any]:
    """The reliability table of all hypotheses with a score of 0.05 and more, and the expected
    calibration error.
    """
    rows = [
        (float(score), bool(problem.accepted[row, column] > 0))
        for row, scores in enumerate(chances)
        for column, score in enumerate(scores)
        if score >= 0.05
    ]
    table, error = [], 0.0
    for number in range(BINS):
        inside = [
            (score, right)
            for score, right in rows
            if number / BINS <= score < (number + 1) / BINS or (score == 1 and number == BINS - 1)
        ]
        if inside:
            said, was = (
                sum(score for score, _ in inside) / len(inside),
                sum(right for _, right in inside) / len(inside),
            )
            table.append(
                {
                    "from": number / BINS,
                    "hypotheses": len(inside),
                    "score": round(said, 3),
                    "right": round(was, 3),
                }
            )
            error += abs(said - was) * len(inside) / len(rows)
    return {"hypotheses": len(rows), "error": round(error, 4), "table": table}


def ranking(cases: Sequence[Case], chances: Any, causes: list[str]) -> dict[str, Any]:
    """Shares of cases whose cause is first, and among the first three; the verdict comes first
    where lines prove it.
    """
    marks = []
    for case, scores in zip(cases, chances, strict=True):
        order = [causes[column] for column in np.argsort(-scores)[:3]]
        verdict = case.found.verdict
        if verdict.cause != "undetermined" and verdict.confidence >= CERTAIN:
            order = [verdict.cause, *order][:3]
        right = {case.cause, *case.accepted}
        marks.append((case, order[0] in right, bool(right & set(order))))
    by = {"all": marks} | {
        name: [mark for mark in marks if mark[0].language == name] for name in ("en", "zh", "mixed")
    }
    return {
        name: {
            "cases": len(some),
            "first": round(sum(m[1] for m in some) / len(some), 3),
            "three": round(sum(m[2] for m in some) / len(some), 3),
        }
        for name, some in by.items()
        if some
    }


def grepped(cases: Sequence[Case]) -> dict[str, Any]:
    """The figure to beat: the causes of all known signatures in the text, the most frequent
    first.
    """
    first = three = 0
    for case in cases:
        counts = Counter(
            signature.cause
            for line in case.text.splitlines()
            for signature in match_line(line)
            if signature.cause
        )
        order = [cause for cause, _ in counts.most_common(3)]
        right = {case.cause, *case.accepted}
        first += bool(right & set(order[:1]))
        three += bool(right & set(order))
    return {"cases": len(cases), "first": round(first / len(cases), 3), "three": round(three / len(cases), 3)}


def measured(cases: Sequence[Case], table: Table) -> dict[str, Any]:
    """Ranking and calibration on cases that no fit has seen, with the table as it is, and what grep
    finds.
    """
    problem = make_problem(cases, table)
    start, _ = start_of(problem, table)
    chances = tempered(probabilities(problem, start), table.temperature)
    return {
        "ranking": ranking(cases, chances, problem.causes),
        "grep of signatures": grepped(cases),
        "calibration": calibration(scaled(chances, table.slope, table.shift), problem),
    }


def main() -> None:
    """Fits, measures, and writes where that is requested."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="+", type=Path)
    parser.add_argument(
        "--no-failure", nargs="+", type=Path, default=[], help="texts that report no failure: .jsonl, or .md"
    )
    parser.add_argument(
        "--kept", nargs="+", type=Path, default=[], help="cases to measure on, never to fit on"
    )
    parser.add_argument("--write", action="store_true", help="write weights.json")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    numbers = json.loads(_FILE.read_text(encoding="utf-8"))
    table = make_table(numbers | {"corrections": {}})
    cases = read_cases(arguments.cases, "fit")
    cases = [case for case in cases if case.cause in table.entries and case.cause != NO_FAILURE]
    problem = make_problem(cases, table)
    start, _ = start_of(problem, table)
    held_out = cross_validated(cases, table)
    temperature = best_temperature(held_out, problem)
    cooled = tempered(held_out, temperature)
    slope, shift = best_calibration(cooled, problem)
    result = {
        "cases": len(cases),
        "grep of signatures": grepped(cases),
        "by hand": ranking(cases, probabilities(problem, start), problem.causes),
        "cross-validated": ranking(cases, held_out, problem.causes),
        "temperature": round(temperature, 2),
        "slope and shift": [slope, shift],
        "calibration, cross-validated": calibration(scaled(cooled, slope, shift), problem),
    }
    if arguments.write:
        others = [case for file in arguments.no_failure for case in read_others(file)]
        none = fit_no_failure(cases, others, table) if others else numbers["corrections"].get(NO_FAILURE, {})
        write(numbers, problem, table, fit(problem, table), temperature, none, (slope, shift))
    if arguments.kept:
        kept = [case for case in read_cases(arguments.kept, "kept") if case.cause in problem.causes]
        result["kept"] = measured(kept, make_table(json.loads(_FILE.read_text(encoding="utf-8"))))
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.results:
        arguments.results.write_text(text, encoding="utf-8")


def write(
    numbers: dict[str, Any],
    problem: Problem,
    table: Table,
    fitted: Fitted,
    temperature: float,
    none: dict[str, float],
    scale: tuple[float, float],
) -> None:
    """Writes the corrections of a fit."""
    corrections: dict[str, dict[str, float]] = {}
    for row, cause in enumerate(problem.causes):
        entry = table.entries[cause]
        some = {
            name: round(float(fitted.weights[row, column] - entry.weights[name]), 2)
            for column, name in enumerate(problem.names)
            if name in entry.weights
        }
        some["prior"] = round(float(fitted.priors[row] - entry.prior), 2)
        corrections[cause] = {name: value for name, value in some.items() if abs(value) >= 0.02}
    corrections[NO_FAILURE] = none
    lines = dict(zip(_LINES, (round(float(level), 2) for level in fitted.levels), strict=True))
    body = {
        "levels": numbers["levels"],
        "lines": lines,
        "temperature": round(temperature, 2),
        "calibration": list(scale),
        "corrections": {cause: some for cause, some in corrections.items() if some},
    }
    _FILE.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
