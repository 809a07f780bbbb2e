"""Checks of this machine: limits, shared memory, cores, memory, disks, clock, versions, processes
of earlier runs; its network; and environment variables.

The variables are those that decide how ranks find and understand each other. Nothing is sent to
other machines.
"""

import difflib
import errno
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from unisono.base._version import PACKAGE
from unisono.base.causes.variables import KNOWN_TO_LIBRARIES, VALUES, VARIABLES, find_variable
from unisono.base.text import one_line, show_seconds
from unisono.front.checks.check import (
    STORAGE_S,
    CheckFunction,
    DoctorCheck,
    Finding,
    Surroundings,
    agreement_findings,
    found,
)
from unisono.front.checks.network_rules import (
    PORT,
    judge_choice,
    judge_firewall,
    judge_infiniband,
    judge_interfaces,
    judge_names,
)
from unisono.guard.agree.compare import judge_storage
from unisono.guard.agree.environment_rules import LAUNCH, judge_settings, need_of
from unisono.guard.agree.machines import judge_limits
from unisono.guard.agree.reports import (
    Member,
    OutputFacts,
    enumerate_words,
    settings_of,
    show_bytes,
    show_setting,
)
from unisono.guard.agree.rules import NEED_MEANING
from unisono.guard.agree.version_rules import judge_known_bad
from unisono.guard.facts import is_synchronised
from unisono.guard.facts.limits import CoreDumps, read_core_dumps
from unisono.guard.facts.network import find_listener, is_loopback, read_firewall
from unisono.guard.facts.processes import Orphan, end_orphan, find_orphans, holder_of
from unisono.guard.facts.storage import StorageFacts, probe_storage
from unisono.guard.rendezvous.head_address import address_towards

OUTPUT = DoctorCheck(
    "system.output",
    "the output directory",
    "a disk that is full, read-only or unresponsive loses the first checkpoint, hours after the start",
    "A separate process writes, syncs, renames, reads back and removes a megabyte in output_dir (without"
    " CONFIG: ./runs) or its nearest parent. Fails if that fails, if the disk does not respond for ten"
    " seconds, or if less than 64 MiB is free. Warns if the folder is in memory (tmpfs).",
    ("storage_unfit", "disk_full", "io_blocked"),
)
CACHES = DoctorCheck(
    "system.caches",
    "caches and temporary files",
    "tokens, downloads and temporary files need space beside the run, and a hanging cache blocks every rank"
    " in its first seconds",
    "The same trial as for system.output, in unisono's cache, the Hub's cache and the temporary directory."
    " Fails if one is not writable or does not respond; warns below 1 GiB free.",
    ("disk_full", "io_blocked"),
)
_MIN_FREE = 2**30
_MEMORY_TYPES = ("tmpfs", "ramfs")
_TORCHRUN_PORT = 29500


def check_output(facts: Surroundings) -> list[Finding]:
    """The run's output folder, by the rules of agreement."""
    report = facts.report
    judged = agreement_findings(
        judge_storage([(Member(report.node_rank, -1, report.host), report)]),
        report,
        {"storage.write": OUTPUT},
    )
    return [_with_file_system(finding, report.output) for finding in judged] + _in_memory(report.output)


def _with_file_system(finding: Finding, output: OutputFacts) -> Finding:
    """A finding with the path and its file system.

    A start waits longer and finds out; doctor reports an unresponsive disk as a failure.
    """
    kind = output.file_system or "file system unknown"
    if finding.status == "unknown" and "does not answer" in output.trouble:
        return found(
            OUTPUT,
            "fail",
            f"{output.path} ({kind}): {output.trouble}",
            fix=[
                f"`df {output.path}` in a second shell; `dmesg | tail`, here or on its server; or choose a"
                " different output_dir"
            ],
        )
    first = f"{output.path} ({kind}): {finding.evidence[0]}"
    if output.path in finding.evidence[0]:
        first = f"{finding.evidence[0]} ({kind})"
    return Finding(finding.id, finding.status, (first, *finding.evidence[1:]), finding.fix)


def _in_memory(output: OutputFacts) -> list[Finding]:
    if output.file_system not in _MEMORY_TYPES:
        return []
    text = (
        f"{output.path} is in memory ({output.file_system}): it is lost on reboot, and files there use up"
        " memory"
    )
    return [found(OUTPUT, "warn", text, fix=["choose an output_dir on a disk"])]


def check_caches(facts: Surroundings) -> list[Finding]:
    """Folders that are written beside the run."""
    environment = facts.environment
    folders = {
        "unisono's cache": environment.cache_dir,
        "the hub's cache": environment.hub_cache,
        "temporary files": environment.temporary_dir,
    }
    with ThreadPoolExecutor(len(folders)) as pool:
        tried = list(pool.map(_probe_folder, folders.values()))
    return [judge_cache(name, one) for name, one in zip(folders, tried, strict=True)]


def _probe_folder(folder: Path) -> StorageFacts:
    return probe_storage(folder, limit_s=STORAGE_S)


def judge_cache(name: str, tried: StorageFacts) -> Finding:
    """Pure."""
    where = f"{name}: {tried.path} ({tried.file_system or 'unknown file system'})"
    fix = [f"`ls -ld {tried.path}`; `df -h {tried.path}`", f"or set {_VARIABLE[name]} to a different folder"]
    if not tried.writable:
        return found(CACHES, "fail", f"{where}: {tried.trouble or 'cannot be tested'}", fix=fix)
    free = "" if tried.free_bytes is None else f"{show_bytes(tried.free_bytes)} free"
    if tried.free_bytes is not None and tried.free_bytes < _MIN_FREE:
        return found(CACHES, "warn", f"{where}: only {free}", fix=fix)
    return found(CACHES, "pass", f"{where}: {free}")


_VARIABLE = {"unisono's cache": "XDG_CACHE_HOME", "the hub's cache": "HF_HOME", "temporary files": "TMPDIR"}


ORPHANS = DoctorCheck(
    "system.orphans",
    "processes of earlier runs",
    "a rank that outlived its run keeps its GPU memory, port and cores, and the next run fails because of it",
    "Processes with a rank's command line, or under `unisono run`, whose front has ended; each with run id,"
    " pid and age. Warns. Nothing is killed without `--end-orphans`, and then only your own processes.",
    ("stale_process",),
)
_SHOWN = 20


def check_orphans(facts: Surroundings) -> list[Finding]:
    """Finds orphans, and kills them with --end-orphans."""
    left = find_orphans()
    ended = {orphan: end_orphan(orphan) for orphan in left} if facts.request.end_orphans else {}
    return [judge_orphans(left, ended)]


def judge_orphans(left: Sequence[Orphan], ended: dict[Orphan, bool]) -> Finding:
    """The finding on orphans. Pure. `ended`: for those to be killed, whether they are gone."""
    if not left:
        return found(ORPHANS, "pass", "none")
    rows = [f"{_row(orphan)}{'; ended' if ended.get(orphan) else ''}" for orphan in left[:_SHOWN]]
    living = [orphan for orphan in left if not ended.get(orphan)]
    if not living:
        return found(ORPHANS, "pass", f"{len(left)} ended", *rows)
    text = f"{len(living)} process{'' if len(living) == 1 else 'es'} without a front"
    own_orphans = [orphan for orphan in living if orphan.mine and orphan.state != "D"]
    fix = []
    if own_orphans:
        fix = [
            "`unisono doctor --end-orphans`",
            f"or `kill -9 {' '.join(str(orphan.pid) for orphan in own_orphans[:_SHOWN])}`",
        ]
    if any(orphan.state == "D" for orphan in living):
        fix.append(
            "a process that waits in the kernel (state D) ends when its storage responds, or on reboot"
        )
    if any(not orphan.mine for orphan in living):
        fix.append("ask the other user to end theirs")
    return found(ORPHANS, "warn", text, *rows, fix=fix)


def _row(orphan: Orphan) -> str:
    run = f"run {orphan.run_id}" if orphan.run_id else f"run unknown ({orphan.plan})"
    owner = "" if orphan.mine else ", another user's"
    return f"{run}: process {orphan.pid}, {show_seconds(orphan.age_s)} old, state {orphan.state}{owner}"


LIMITS = DoctorCheck(
    "system.limits",
    "ulimits and container limits",
    "a rank opens hundreds of files, sockets and threads, and fails mid-run when it reaches a limit",
    "`ulimit -n`, `-u`, `-l`, `-s`, and the cgroup's pids.max. Fails below 256 open files per process; warns"
    " below 4,096 (32,768 from 128 ranks on), below 1,024 processes and threads, below 64 MiB of locked"
    " memory with InfiniBand, and for an unlimited stack with NCCL before 2.28.",
    ("ulimit",),
)
SHM = DoctorCheck(
    "system.shm",
    "shared memory",
    "ranks and data loaders of one machine communicate through /dev/shm, and NCCL fails with a bus error or"
    " an allocation error if it is full",
    "Size and free bytes of /dev/shm. Warns below 64 MiB. For several ranks with GPUs, fails below 64 MiB and"
    " warns below 1 GiB.",
    ("shm_too_small",),
)
CORES = DoctorCheck(
    "system.cores",
    "cores compared with ranks and threads",
    "ranks that share cores slow each other down in every step",
    "Cores by CPU affinity and by cgroup CPU quota, compared with ranks × threads. Warns if there are too"
    " few.",
    ("straggler",),
)
MEMORY = DoctorCheck(
    "system.memory",
    "host memory",
    "the kernel kills a process, usually a rank, when memory runs out",
    "Free memory within all cgroup limits, compared with the reserve of the system (a tenth, at least 1 GiB)."
    " Warns if only the reserve is left.",
    ("host_oom_killed",),
)
CORE_DUMPS = DoctorCheck(
    "system.core_dumps",
    "core dumps",
    "a crashed rank writes all its memory to a file, and eight of them fill the disk that checkpoints need",
    "`ulimit -c` and the kernel's core_pattern. Warns if dumps of any size are written to files.",
    ("disk_full",),
)
CLOCK = DoctorCheck(
    "system.clock",
    "clock",
    "with a wrong clock, certificates are rejected, files seem to be from the future, and torchrun's"
    " rendezvous considers live nodes dead; unisono itself compares no clocks",
    "Fails if the clock is earlier than the day on which unisono was installed; warns if the kernel reports"
    " that no time service synchronizes it.",
    ("clock_skew",),
)
VERSIONS = DoctorCheck(
    "system.versions",
    "versions with known bugs",
    "some versions of torch, NCCL and others hang or compute wrong results, which takes days to find out",
    "Installed versions are compared with a table of reported bugs that apply to this machine. Warns, with"
    " the first fixed version and the bug report.",
    ("version_known_bad",),
)

_RULES = {"limits": LIMITS, "shm": SHM, "cores": CORES, "memory": MEMORY, "known_bad": VERSIONS}
_LARGE_DUMP = 2**30
_DAY_S = 86_400.0


def check_limits(facts: Surroundings) -> list[Finding]:
    """Limits, shared memory, cores and memory, by the rules of agreement."""
    report = facts.report
    return agreement_findings(
        judge_limits([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_versions(facts: Surroundings) -> list[Finding]:
    """Known bugs, by the table of agreement."""
    report = facts.report
    return agreement_findings(
        judge_known_bad([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_core_dumps(facts: Surroundings) -> list[Finding]:
    """Whether core dumps can fill the disk."""
    del facts
    return [judge_core_dumps(read_core_dumps())]


def judge_core_dumps(dumps: CoreDumps) -> Finding:
    """Pure."""
    size = "of any size" if dumps.limit_bytes is None else f"up to {show_bytes(dumps.limit_bytes)}"
    if dumps.limit_bytes == 0:
        return found(CORE_DUMPS, "pass", "disabled (ulimit -c 0)")
    if not dumps.to_file:
        return found(CORE_DUMPS, "pass", f"handled by a program: {dumps.pattern}")
    where = (
        dumps.pattern
        if dumps.pattern.startswith("/")
        else f"{dumps.pattern or 'core'} in the working directory"
    )
    if dumps.limit_bytes is None or dumps.limit_bytes > _LARGE_DUMP:
        return found(
            CORE_DUMPS,
            "warn",
            f"files {size} per crashed process: {where}",
            fix=["`ulimit -c 0` before the start, unless you are debugging a crash"],
        )
    return found(CORE_DUMPS, "pass", f"files {size}: {where}")


def check_clock(facts: Surroundings) -> list[Finding]:
    """Whether the clock is plausible and synchronized."""
    installed_s = (PACKAGE / "__init__.py").stat().st_mtime
    return [judge_clock(facts.probes.clock.wall(), installed_s=installed_s, synchronised=is_synchronised())]


def judge_clock(wall_s: float, *, installed_s: float, synchronised: bool | None) -> Finding:
    """The finding on the clock.

    Pure. Seconds since 1970; `installed_s`: modification time of unisono's files.

    The time is shown only where it matters or nothing is wrong, so that nodes with the same problem
    share a line.
    """
    now = f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if wall_s < installed_s - _DAY_S:
        was = f"{datetime.fromtimestamp(installed_s, UTC):%Y-%m-%d}"
        fix = ["`timedatectl set-ntp true`", "or `date -s` with the right time"]
        return found(CLOCK, "fail", f"{now}, but unisono's files were installed on {was}", fix=fix)
    if synchronised is False:
        fix = ["`timedatectl set-ntp true`, then `chronyc tracking`; for a container do it on the host"]
        return found(CLOCK, "warn", "the kernel reports that no time service synchronizes it", fix=fix)
    if synchronised is None:
        return found(CLOCK, "unknown", "unknown whether a time service synchronizes it")
    return found(CLOCK, "pass", f"{now}; synchronized by a time service")


CATALOGUE: tuple[DoctorCheck, ...] = (
    LIMITS,
    SHM,
    CORES,
    MEMORY,
    CORE_DUMPS,
    CLOCK,
    VERSIONS,
    OUTPUT,
    CACHES,
    ORPHANS,
)
CHECKS: tuple[CheckFunction, ...] = (
    check_limits,
    check_core_dumps,
    check_clock,
    check_versions,
    check_output,
    check_caches,
    check_orphans,
)


def check_network(around: Surroundings) -> list[Finding]:
    """Interfaces, choices, names, ports of InfiniBand, and the firewall."""
    report, topology = around.report, around.local_node.topology
    settings = settings_of(report)
    cuda = report.device_kind == "cuda"
    head = topology.head_host
    began = time.monotonic()
    addresses = around.probes.network.resolve(report.host)
    took_s = time.monotonic() - began
    found_head = around.probes.network.resolve(head) if head and topology.nodes > 1 else []
    # Several "nodes" on one machine's loopback need no way out of it.
    several = topology.nodes > 1 and not (head == "localhost" or (found_head == [head] and is_loopback(head)))
    address = _own_address(around, found_head) if several else ""
    return [
        judge_interfaces(report.interfaces, several=several),
        *judge_choice(
            report.interfaces, settings, own_addresses=addresses, several=several, cuda=cuda, address=address
        ),
        judge_names(
            report.host,
            addresses,
            took_s,
            head=head,
            head_addresses=found_head,
            several=several,
            is_head=topology.is_head,
        ),
        *judge_infiniband(around.probes.infiniband(), settings),
        *judge_firewall(read_firewall() if several else None, several=several),
    ]


def _own_address(around: Surroundings, head: list[str]) -> str:
    """This machine's address, on which the other nodes reach it; empty if unknown."""
    topology = around.local_node.topology
    if not head:
        return ""
    return head[0] if topology.is_head else address_towards(topology.head_host, around.probes.network)


def check_port(around: Surroundings) -> list[Finding]:
    """The finding on the head's port: on node 0 of several nodes, or for torchrun's ranks."""
    topology = around.local_node.topology
    requested = around.environment.variables.get("MASTER_PORT") or around.environment.leftovers.get(
        "MASTER_PORT", ""
    )
    if topology.nodes > 1 and not topology.is_head:
        return []
    if topology.nodes > 1 and topology.hosts and topology.head_port == 0:
        return [
            found(PORT, "pass", "the system chooses a free one, and --hosts passes it to the other nodes")
        ]
    needed = topology.nodes > 1
    named = needed or requested.isdecimal()
    port = topology.head_port if needed else int(requested) if requested.isdecimal() else _TORCHRUN_PORT
    if not 0 < port < 1 << 16:
        return [
            found(
                PORT,
                "fail",
                f"{port} is not a valid port",
                fix=["--head HOST:29500, or export MASTER_PORT=29500"],
            )
        ]
    problem = _bind_error(port)
    if problem:
        listener = find_listener(port)
        who = (
            f": pid {listener.pid} ({one_line(holder_of(listener.pid).command, limit=80)})"
            if listener
            else ""
        )
        fix = [f"end that process: kill {listener.pid}"] if listener else []
        fix.append(
            "or use a different port: --head HOST:PORT on every node"
            if needed
            else "or use a different port: torchrun --master-port PORT"
        )
        return [found(PORT, "fail" if named else "warn", f"port {port}: {problem}{who}", fix=fix)]
    low, high = _ephemeral_range()
    if named and low <= port <= high:
        text = (
            f"port {port} is free now, but in the ephemeral range ({low}–{high}), from which the system"
            " assigns ports"
        )
        return [found(PORT, "warn", text, fix=[f"choose one below {low}, e.g. {_TORCHRUN_PORT}"])]
    return [found(PORT, "pass", f"port {port} is free")]


def _bind_error(port: int) -> str:
    """Why the port cannot be bound now; empty: it can. The port is released at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "in use by a different program"
            return one_line(error.strerror or str(error))
    return ""


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32_768, 60_999
    return int(low), int(high)


NETWORK_CHECKS: tuple[CheckFunction, ...] = (check_network, check_port)


VALUES_CHECK = DoctorCheck(
    "settings.values",
    "values of variables that are set",
    "a library reads an invalid value as a different one or ignores it, usually without a message",
    "Every variable of the catalogue, and of the families NCCL_, TORCH_NCCL_, GLOO_ and similar, from the"
    " environment and from nccl.conf, with its meaning and whether nodes must agree on it. Warns for an"
    " invalid value; fails if no process group can be created with it.",
    ("env_suspicious",),
)
SUSPICIOUS = DoctorCheck(
    "settings.suspicious",
    "suspicious settings",
    "workarounds stay in a shell profile, and slow down or hang later jobs",
    "A table of settings that are obsolete, slow, contradictory, or workarounds for hardware that this"
    " machine does not have; and unknown names of NCCL, torch and gloo, with the nearest known one. Warns;"
    " fails if the run could not start.",
    ("env_suspicious", "invalid_device_ordinal", "duplicate_gpu"),
)
MISSPELT = DoctorCheck(
    "settings.misspelt",
    "misspelled names",
    "a misspelled variable has no effect, and no library reports it",
    "Unknown names that resemble known variables. Warns, with the probable name.",
    ("env_suspicious",),
)
LEFT_OVER = DoctorCheck(
    "settings.left_over",
    "variables left over from an earlier job",
    "RANK, WORLD_SIZE or MASTER_ADDR in a shell make other programs wait for ranks that never start; unisono"
    " ignores them with a note",
    "Variables that launchers set for the processes of a job, found in an environment without a launcher."
    " Warns.",
    ("world_mismatch", "env_suspicious"),
)
SETTINGS: tuple[DoctorCheck, ...] = (VALUES_CHECK, SUSPICIOUS, MISSPELT, LEFT_OVER)

_SIMILARITY = 0.88  # CUDA_VISIBLE_DEVICE is, CUDA_HOME is not
_OF_FAMILY = re.compile(r"^(NCCL|GLOO|TORCH|CUDA|PYTORCH|OMP)_")
_JOB_VARIABLE = re.compile(r"^(TORCHELASTIC_|PET_|OMPI_COMM_WORLD_|PMI_|MV2_COMM_WORLD_|UNISONO_)")


def check_values(facts: Surroundings) -> list[Finding]:
    """Variables that are set, and their invalid values."""
    settings = settings_of(facts.report)
    wrong = [
        finding
        for name, value in settings.items()
        if (finding := _invalid_value(name, value, facts)) is not None
    ]
    if wrong:
        return wrong
    rows = [_explain(name, value, facts.report.variables) for name, value in settings.items()]
    rows += [
        f"{name}: {_unknown_name(name)}" for name in facts.environment.strangers if _OF_FAMILY.match(name)
    ]
    if not rows:
        return [found(VALUES_CHECK, "pass", "none is set: libraries use their defaults")]
    many = f"{len(rows)} set, each with a valid value" if len(rows) > 1 else "one set, with a valid value"
    return [found(VALUES_CHECK, "pass", many, *rows)]


def _invalid_value(name: str, value: str, facts: Surroundings) -> Finding | None:
    takes = VALUES.get(name)
    if takes is None or not value.strip() or re.fullmatch(takes.pattern, value.strip(), re.IGNORECASE):
        return None
    fatal = takes.fatal and facts.report.device_kind == "cuda"
    text = f"{show_setting(name, value)}: valid is {takes.text}; with this {takes.otherwise}"
    fix = [f"`unset {name}`, or set it to a valid value", f"`unisono explain {name}` describes it"]
    return found(VALUES_CHECK, "fail" if fatal else "warn", text, fix=fix)


def _explain(name: str, value: str, environment: Mapping[str, str]) -> str:
    """`NCCL_P2P_DISABLE=1: …; must be equal everywhere`."""
    known = find_variable(name)
    where = "" if name in environment else " (in nccl.conf)"
    meaning = known.meaning if known is not None else _unknown_name(name)
    return f"{show_setting(name, value)}{where}: {meaning}; it {NEED_MEANING[need_of(name)]}"


def _unknown_name(name: str) -> str:
    return "see its library's documentation" if name in KNOWN_TO_LIBRARIES else "unknown to unisono"


def check_suspicious(facts: Surroundings) -> list[Finding]:
    """Suspicious settings, by the table of agreement."""
    report = facts.report
    members = [(Member(report.node_rank, -1, report.host), report)]
    reasons = {} if facts.loaded is None else facts.loaded.config.reasons
    return [
        _with_reason(finding, reasons)
        for finding in agreement_findings(judge_settings(members), report, {"settings": SUSPICIOUS})
    ]


def _with_reason(finding: Finding, reasons: Mapping[str, str]) -> Finding:
    """The finding, with the reasons that the config gives for its settings."""
    rows = [
        f"{name} is set on purpose: {why}"
        for name, why in reasons.items()
        if finding.status != "pass" and re.search(rf"\b{re.escape(name)}\b", finding.evidence[0])
    ]
    return replace(finding, evidence=(*finding.evidence, *rows)) if rows else finding


def check_misspelt(facts: Surroundings) -> list[Finding]:
    """Unknown names that resemble known variables; names with the prefixes of NCCL, torch and gloo
    are among the suspicious ones.
    """
    known = [variable.name for variable in VARIABLES]
    wrong = []
    for name in facts.environment.strangers:
        normalized = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        if normalized and name not in KNOWN_TO_LIBRARIES and name not in facts.report.variables:
            fix = [
                f'`export {normalized[0]}="${name}"; unset {name}`, if you mean that',
                f"`unisono explain {normalized[0]}`",
            ]
            wrong.append(
                found(MISSPELT, "warn", f"{name} is set but unknown: did you mean {normalized[0]}?", fix=fix)
            )
    return wrong or [found(MISSPELT, "pass", "no misspelled names")]


def check_left_over(facts: Surroundings) -> list[Finding]:
    """Variables of a launcher that is not running."""
    if facts.environment.live_launcher is not None:
        return [
            found(
                LEFT_OVER,
                "pass",
                f"{facts.environment.live_launcher} is running, and its variables belong to this job",
            )
        ]
    names = [
        name
        for name in (*facts.local_node.leftovers, *facts.environment.strangers)
        if name in LAUNCH or _JOB_VARIABLE.match(name)
    ]
    if not names:
        return [found(LEFT_OVER, "pass", "none")]
    named = sorted(set(names))
    text = f"{enumerate_words(named, at_most=12)}: set, but no launcher is running here"
    return [found(LEFT_OVER, "warn", text, fix=[f"`unset {' '.join(named)}`"])]


SETTINGS_CHECKS: tuple[CheckFunction, ...] = (check_values, check_suspicious, check_misspelt, check_left_over)
