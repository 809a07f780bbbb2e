"""`unisono doctor --launcher`: the checks run on nodes that a launcher places; node 0's table comes
back here.
"""

from collections.abc import Mapping, Sequence

from unisono.base.errors import UnfitError, UsageError
from unisono.base.files import parse_json
from unisono.base.messages import RefusedMessage, message_of
from unisono.front.checks.check import DoctorRequest, findings_of, read_config
from unisono.front.checks.examination import Examination, examine, redacted
from unisono.guard.supervise.child_process import option_args
from unisono.guard.supervise.task_process import refusal
from unisono.jobs.launchers.launcher import Launcher, NodesCommand
from unisono.jobs.launchers.launchers import prepare_launcher

_DISAGREE = 3


def read_answer(line: str) -> Mapping[str, object] | None:
    """The JSON object of a line of doctor's output: its checks, or its refusal; None for any other
    line.
    """
    try:
        body = parse_json(line)
    except ValueError:
        return None
    if isinstance(body, dict) and (isinstance(body.get("checks"), list) or body.get("kind") == "refused"):
        return body
    return None


def examination_of(answer: Mapping[str, object], *, code: int, host: str) -> Examination:
    """The examination that node 0 reports.

    Args:
        answer: from `read_answer`.
        code: node 0's exit code.

    Raises:
        UnisonoError: the refusal of node 0, in the class of its exit code.
    """
    if "checks" not in answer:
        raise refusal(message_of(RefusedMessage, answer))
    return Examination(host, findings_of(answer), agreed=code != _DISAGREE)


def no_answer_error(*, where: str, tail: Sequence[str], fix: str) -> UnfitError:
    """The error for a doctor run on a cluster that printed no result."""
    return UnfitError.of(
        "doctor on the nodes ended without a result from node 0",
        where=where,
        why="; ".join(tail) or "it printed nothing",
        fix=fix,
    )


def examine_with_launcher(request: DoctorRequest) -> Examination:
    """Runs doctor with the launcher of the request.

    Raises:
        UnisonoError: as `examine`; or if an option belongs to a different launcher, or its cluster
            cannot provide the nodes.
    """
    launcher, request = prepare_launcher(request)
    if request.debug_comm and not request.ladder:
        raise UsageError.of(
            "--debug-comm keeps the libraries' logs of the collectives of --ladder",
            where="command line",
            why="without --ladder doctor reports only the outcome of a collective",
            fix=(
                "unisono doctor --ladder"
                f" --debug-comm{'' if request.nproc is None else f' --nproc {request.nproc}'}, with the other"
                " options as they are"
            ),
        )
    if launcher.places_nodes:
        return _redacted_examination(_examine_on_nodes(request, launcher))
    return examine(request)


def _examine_on_nodes(request: DoctorRequest, launcher: Launcher) -> Examination:
    """The findings of doctor on the launcher's nodes, merged by node 0."""
    command = NodesCommand(
        "doctor",
        tuple(option_args(request.node_options)),
        request=request,
        config_path=request.config_path if request.has_config else None,
        loaded=read_config(request),
        show=request.show,
    )
    output = launcher.run_on_nodes(command)
    answers = (parsed for line in reversed(output.lines) if (parsed := read_answer(line)))
    answer = next(answers, None)
    if answer is None:
        raise no_answer_error(where=output.where, tail=output.tail, fix=output.fix)
    return examination_of(answer, code=output.code, host=output.host)


def _redacted_examination(examination: Examination) -> Examination:
    """Text of a different process is redacted, too: people paste it into issues."""
    return Examination(examination.host, redacted(examination.findings), agreed=examination.agreed)
