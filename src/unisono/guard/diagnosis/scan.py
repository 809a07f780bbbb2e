"""Reads one log: which lines mean something.

Flat memory: of each kind of event of each rank the first and the last are kept.
"""

import codecs
import functools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import BinaryIO

from unisono.base.causes.signatures import LINE_LIMIT, all_signatures, compiled, match_hints
from unisono.base.text import plain
from unisono.guard.diagnosis.line_prefixes import (
    LOOK_CHARS,
    CollectorPrefix,
    find_rank,
    find_style,
    find_time,
    find_year,
    split_prefix,
    unwrap_json,
    who_is_file,
)
from unisono.guard.diagnosis.lines import (
    SHOWN_CHARS,
    Chunk,
    Hints,
    Prefilter,
    read_chunks,
    shown,
    split_pieces,
)
from unisono.guard.diagnosis.process_ends import Tracebacks
from unisono.guard.diagnosis.run_facts import NO_ORIGIN, Event, EventKind, Origin, Traceback


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of line that states a fact.

    Attributes:
        hints: strings of which the line must hold one.
        pattern: searched in the line without its prefixes; its groups are the fields.
        kind: "fact", or a more specific kind, e.g. "progress".
    """

    id: str
    hints: tuple[str, ...]
    pattern: str
    kind: str = "fact"


_N = r"\d{1,9}"

# fmt: off
MARKS: tuple[Mark, ...] = (
    # Who takes part.
    Mark("process_rank", ("Process rank: ",), rf"Process rank: (?P<rank>{_N})(?:, world size: (?P<world>{_N}))?(?:, device: (?P<device>[\w:]{{1,20}}))?"),
    Mark("rank_of_world", ("rank ", "Rank ", "rank=", "RANK=", "rank: "),
         rf"(?:^|\W)(?:[Gg]lobal )?[Rr]ank[ :=]{{1,3}}(?P<rank>{_N})(?: ?/ ?| of | out of |, world[_ ]size[ :=]{{1,3}})(?P<world>{_N})\b"),
    Mark("processes", ("um_processes", "um processes", "umber of processes"), rf"[Nn]um(?:ber of)?[_ ]processes[`'\"]{{0,2}}(?: was set to a value of)?[ :=`]{{1,4}}(?P<world>{_N})\b"),
    Mark("world_size", ("orld size", "orld_size", "WORLD_SIZE", "world-size"), rf"[Ww](?:orld|ORLD)[ _-][Ss](?:ize|IZE)[\"']?[ :=]{{1,4}}(?P<world>{_N})\b"),
    Mark("lightning_member", ("GLOBAL_RANK: ",), rf"GLOBAL_RANK: (?P<rank>{_N}), MEMBER: (?P<member>{_N})/(?P<world>{_N})"),
    Mark("lightning_started", ("All distributed processes registered",), rf"Starting with (?P<world>{_N}) processes"),
    Mark("ray_rank", ("world_rank=",), rf"world_rank=(?P<rank>{_N})(?:, world_size=(?P<world>{_N}))?(?:, local_rank=(?P<local_rank>{_N}))?"),
    Mark("ray_member", ("world_rank=", " rank="), rf"[(-] ?\(?(?:node_id=\w{{1,80}}, )?(?:ip|node_ip)=(?P<ip>[\w.:-]{{3,60}}), pid=(?P<pid>{_N})\) (?:world_)?rank=(?P<rank>{_N})"),
    Mark("ray_snippet", ("Error Snippet]", "Error Message]"), rf"\[Rank (?P<rank>{_N}) Error (?:Snippet|Message)\]"),
    Mark("ray_pid", ("pid=", "pid: "), rf"^\s{{1,8}}pid[=:] ?(?P<pid>{_N}),?$"),
    Mark("ray_ip", ("ip: ", "node_ip="), r"^\s{1,8}(?:node_)?ip[=:] ?'?(?P<ip>[\d.:a-f]{3,45})'?,?$"),
    Mark("ray_low", ("IP: ",), r"(?:\((?:ID: \w{1,80}, )?|[Tt]he node )IP: (?P<ip>[\w.:-]{3,60})[,)]"),
    Mark("ray_dead", ("Worker PID: ",), rf"Worker IP address: (?P<ip>[\w.:-]{{3,60}}) .{{0,60}}Worker PID: (?P<pid>{_N})"),
    Mark("ray_task", ("ray::",), rf"ray::[\w.<>]{{1,120}}\(\) \(pid=(?P<pid>{_N}), ip=(?P<ip>[\w.:-]{{3,60}})"),
    Mark("ray_node_dead", ("node with node id", "node name: "), r"node with node id: \w{1,80} and address: (?P<ip>[\w.:-]{3,60}) .{0,120}has been marked dead"),
    Mark("ray_health", ("Worker ",), rf"^Worker (?P<rank>{_N}) has failed\."),
    Mark("ray_distributed", ("distributed_context=", "world_size="), rf"world_rank=(?P<rank>{_N}), world_size=(?P<world>{_N})"),
    Mark("nccl_rank", ("nranks ", "Init START", "Init COMPLETE"), rf"(?:comm 0x\w{{1,20}} )?rank (?P<rank>{_N}) nranks (?P<world>{_N})"),
    Mark("spawned", ("spawned with command",), rf"process (?P<pid>{_N}) spawned with command: .{{0,1500}}--local_rank[=', ]{{1,4}}(?P<local_rank>{_N})"),
    Mark("spmd_error", ("terminated with the following error", "terminated with signal", "terminated with exit code"),
         rf"[Pp]rocess (?P<local_rank>{_N}) terminated with (?:the following error|signal (?P<signal>SIG\w{{2,8}})|exit code (?P<code>{_N}))"),
    # Launchers.
    Mark("lf_tasks", ("distributed tasks at:",), rf"Initializing (?P<count>{_N}) distributed tasks at: (?P<head>\S{{1,200}})"),
    Mark("lf_nodes", ("Multi-node training enabled",), rf"num nodes: (?P<nodes>{_N}), node rank: (?P<node>{_N})"),
    Mark("omp_banner", ("Setting OMP_NUM_THREADS environment variable",), r"Setting OMP_NUM_THREADS environment variable for each process", "progress"),
    Mark("launched", ("torchrun ", "torch.distributed.run", "torch.distributed.launch", "accelerate launch", "deepspeed ", "llamafactory-cli train", "srun ", "sbatch ", "FORCE_TORCHRUN"),
         r"^(?:\+{1,3} |\$ |# |\[[^\]]{1,80}\][$#] |\S{1,80}[$#] |root@\S{1,80} |nohup |exec )?(?:[A-Z_]{2,40}=\S{1,200} ){0,12}(?:python3? -m )?(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|llamafactory-cli train|srun) (?P<arguments>.{1,400})"),
    Mark("deepspeed_cmd", ("[runner.py:",), r"\[runner\.py:\d{1,5}:main\] cmd = (?P<arguments>.{1,600})"),
    Mark("deepspeed_nodes", ("nnodes=",), rf"nnodes=(?P<nodes>{_N}), num_local_procs=(?P<count>{_N}), node_rank=(?P<node>{_N})"),
    Mark("deepspeed_world", ("dist_world_size=",), rf"dist_world_size=(?P<world>{_N})"),
    Mark("deepspeed_done", ("exits successfully",), rf"\bProcess (?P<pid>{_N}) exits successfully"),
    Mark("devices_set", ("CUDA_VISIBLE_DEVICES",), r"CUDA_VISIBLE_DEVICES[\"']?(?:=|: ?| is set to |->)[\"' ]{0,2}(?P<devices>[\w,-]{0,200})"),
    Mark("devices_unset", ("CUDA_VISIBLE_DEVICES",), r"CUDA_VISIBLE_DEVICES (?:is )?(?:not set|unset)|unset CUDA_VISIBLE_DEVICES"),
    Mark("nproc", ("nproc_per_node", "nproc-per-node", "NPROC_PER_NODE", "local_world_size", "local world size"), rf"(?:nproc[_-]per[_-]node|NPROC_PER_NODE|local_world_size)[\"']?[ :=]{{1,4}}(?P<count>{_N})\b"),
    Mark("nnodes", ("nnodes", "NNODES", "num_nodes", "num nodes"), rf"(?:nnodes|NNODES|num[_ ]nodes)[\"']?[ :=]{{1,4}}(?P<nodes>{_N})\b"),
    Mark("launch_rank", ("NNODES=",), rf"\bNNODES=(?P<nodes>{_N})\b.{{0,200}}?\b(?:NODE_)?RANK=(?P<node>{_N})\b"),
    Mark("node_rank", ("node_rank", "NODE_RANK", "node rank"), rf"[Nn](?:ode|ODE)[_ ][Rr](?:ank|ANK)[\"']?[ :=]{{1,4}}(?P<node>{_N})\b"),
    Mark("visible_count", ("evice count", "evice_count", "visible devices", "visible GPUs", "GPUs visible", "num_gpus"),
         rf"(?:[Dd]evice[_ ]count|visible (?:devices|GPUs)|GPUs visible|num_gpus)[\"']?[ :=]{{1,4}}(?P<count>{_N})\b"),
    Mark("table_first", ("Root Cause (first observed failure)",), r"Root Cause \(first observed failure\)"),
    Mark("table_failures", ("Failures:", "Other Failures"), r"^\W{0,4}(?:Other )?Failures:\s{0,20}$"),
    Mark("table_time", ("time ",), r"^ {0,6}time {1,6}: (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)"),
    Mark("table_host", ("host ",), r"^ {0,6}host {1,6}: (?P<host>\S{1,120})"),
    Mark("table_rank", ("(local_rank: ",), rf"^ {{0,6}}rank {{1,6}}: (?P<rank>{_N}) \(local_rank: (?P<local_rank>{_N})\)"),
    Mark("table_exit", ("exitcode ",), rf"^ {{0,6}}exitcode {{1,6}}: (?P<code>-?{_N}) {{1,3}}\(pid: (?P<pid>{_N})\)"),
    Mark("table_signal", ("Signal ",), rf"^ {{0,6}}traceback {{1,4}}: Signal (?P<signal>{_N}) \(SIG\w{{2,8}}\) received by PID (?P<pid>{_N})"),
    Mark("died_with", ("died with <Signals.",), r"died with <Signals\.(?P<signal>SIG\w{2,8}): \d{1,2}>"),
    Mark("terminate", ("terminate called",), r"terminate called (?:after|without|recursively)"),
    Mark("exit_line", ("failed (exitcode:",), rf"failed \(exitcode: (?P<code>-?{_N})\) {{0,3}}local_rank: (?P<local_rank>{_N}) \(pid: (?P<pid>{_N})\)"),
    Mark("deepspeed_return", ("exits with return code",), rf"exits with return code = (?P<code>-?{_N})"),
    Mark("deepspeed_killing", ("Killing subprocess",), rf"Killing subprocess (?P<pid>{_N})"),
    Mark("rank_exit", ("exited with", "crashed with", "terminated with", "died with"),
         rf"(?:[Gg]lobal )?[Rr]ank[ :=]{{1,2}}(?P<rank>{_N})\b(?: \(?(?:PID|pid)[ :=]{{1,2}}(?P<pid>{_N})\)?)?[^.]{{0,40}}? (?:exited|crashed|terminated|died) with (?:exit )?(?P<how>code|status|signal)[ :=]{{1,2}}(?P<code>-?{_N})"),
    Mark("section", ("Begin global rank",), rf"-{{4,}} ?Begin global rank (?P<rank>{_N}) STD(?:OUT|ERR)"),
    Mark("container_exit", ("xit code", "Exit Code", "exited with", "exit status", "exitCode", "Error 1"),
         r"(?:^(?P<host>[\w.-]{1,63}) )?(?:[Ee]xit(?:ed)?(?: with)?(?: exit)?[ _]?(?:code|Code|status)|exitCode)[\"']?(?:\(s\))?[:= ]{1,12}(?P<code>13[1-9])\b|\*{3} \[.{1,200}\] Error (?P<make>13[1-9])\b"),
    Mark("node_failed", ("Node failure on",), r"[Nn]ode failure on (?P<host>[\w.-]{1,60})"),
    Mark("pod_named", ("Name:", "pod/", "Pod:"), r"(?:^(?:Name|Pod): {1,20}|\bpod/)(?P<pod>[a-z0-9][a-z0-9.-]{1,120})"),
    Mark("srun_exit", ("srun: error:",), rf"srun: error: (?P<host>[\w.-]{{1,60}}): tasks? (?P<rank>[\d,-]{{1,40}}): (?P<how>Exited with exit code (?P<code>{_N})|[A-Z][\w ]{{2,40}})"),
    Mark("mpirun_exit", ("mpirun noticed", "mpirun detected", "Process name:"), rf"process rank (?P<rank>{_N}) with PID (?P<pid>{_N}) on node (?P<host>[\w.-]{{1,60}}) exited on signal (?P<signal>{_N})"),
    Mark("killed_pid", ("Killed process ",), rf"Killed process (?P<pid>{_N})"),
    Mark("xid_pid", ("NVRM: Xid",), rf"NVRM: Xid \(PCI:(?P<bus>[\w:.]{{4,20}})\): (?P<xid>\d{{1,4}})(?:, pid='?(?P<pid>{_N}))?"),
    Mark("segfault_pid", ("segfault at", "general protection fault", "trap invalid opcode"), rf"(?:\w|-){{1,40}}\[(?P<pid>{_N})\]:? (?:segfault at|general protection fault|trap invalid opcode)"),
    # Who waited for what.
    Mark("watchdog", ("Watchdog caught collective operation timeout", "failure detected by watchdog at work", "detected by watchdog at work", "ast enqueued"),
         rf"(?:WorkNCCL\((?:SeqNum=(?P<seq>{_N}), )?OpType=(?P<op>\w{{1,40}})(?:, (?:TensorShape=\[[\d, ]{{0,80}}\], )?NumelIn=(?P<numel_in>\d{{1,15}}), NumelOut=(?P<numel_out>\d{{1,15}}))?, Timeout\(ms\)=(?P<timeout>{_N})"
         rf"|detected by watchdog at work(?: sequence id)?: (?P<at>{_N})|[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>{_N}), last completed (?:NCCL )?work: (?P<completed>{_N}))"),
    Mark("watchdog_status", ("ast enqueued",), rf"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>{_N}), last completed (?:NCCL )?work: (?P<completed>{_N})"),
    Mark("monitored_barrier", ("monitoredBarrier", "monitored barrier"), r"[Rr]anks? (?P<ranks>[\d, ]{1,200}) failed to pass monitoredBarrier"),
    Mark("nan_of_rank", ("Unexpected result", "in local grad", "in local forward"), rf"Rank (?P<rank>{_N})(?:, node (?P<host>[\w.-]{{1,63}}), device \w{{1,9}}|: found (?:NaN|Inf|nan|inf) in local)"),
    Mark("not_come", ("allreduce", "allgather", "issing ranks: ", "Distributed", "/job:"),
         rf"^(?P<ranks>{_N}): \[(?:\w{{0,20}}[Aa]ll(?:reduce|gather)|[Bb]roadcast|Distributed)|\[?[Mm]issing ranks: (?P<missing>[\d, ]{{1,200}})|^/job:\w{{1,40}}/replica:\d{{1,4}}/task:(?P<task>{_N})"),
    Mark("lagging", ("didn't join collective", "are the lagging ranks"), r"\[(?P<ranks>[\d, ]{1,400})\] (?:finished collective #\d{1,12}, but didn.t join collective|are the lagging ranks)"),
    Mark("fingerprint", ("CollectiveFingerPrint(",),
         rf"Rank (?P<one>{_N}) is running (?:collective: )?CollectiveFingerPrint\((?:SequenceNumber={_N}, )?(?P<one_print>OpType=\w{{1,40}}(?:, TensorShape=\[[\d, ]{{0,80}}\])?)"
         rf".{{0,700}}?but Rank (?P<other>{_N}) is running (?:collective: )?CollectiveFingerPrint\((?:SequenceNumber={_N}, )?(?P<other_print>OpType=\w{{1,40}}(?:, TensorShape=\[[\d, ]{{0,80}}\])?)"),
    # How far it came.
    Mark("length", ("ength", "len(", "num_rows", "Num examples", "batches", "samples", "per_epoch", "per epoch", "examples", "num_samples", "rain size", "set size", "rain_size"),
         r"(?:[Tt]rain(?:ing)?[ _](?:[Ss]et |data |dataset )?size|[Tt]raining [Ss]et [Ll]ength|[Vv]alidation [Ss]et [Ll]ength|len\([\w.]{1,60}\)|(?:train(?:ing)?|eval)?[_ -]?(?:data)?(?:loader|set)[_ ](?:length|size|len)|[Nn]um(?:ber of)?[_ ](?:train(?:ing)?[_ ])?(?:batches|samples|examples|rows|steps)"
         r"|(?:batches|steps)[_ -]per[_ -]epoch)"
         rf"[\w ]{{0,24}}[=: ]{{1,4}}(?P<length>\d[\d,]{{0,14}})\b(?: ?\(rank (?P<rank>{_N})\))?"),
    Mark("rank_has", ("batches", "samples", "steps", "examples", "rows"), rf"[Rr]ank[ :=]?(?P<rank>{_N})\W{{1,3}}(?:\w{{1,12}} ){{0,4}}(?P<length>\d[\d,]{{0,14}}) (?:\w{{1,12}} ){{0,1}}(?:batches|samples|steps|examples|rows)\b"),
    Mark("rank_done", ("finished", "done", "completed", "exiting", "leaving", "exhausted", "no more"),
         rf"[Rr]ank[ :=]?(?P<rank>{_N})\b.{{0,40}}\b(?:finished|done|completed|exiting|leaving|exhausted|no more)\b(?: (?:its|all|with)?)?(?: ?(?P<steps>{_N}) (?:steps|batches))?"),
    Mark("bar", ("it/s]", "s/it]", "?it/s]", "it/s, ", "s/it, "), rf"(?P<step>{_N})/(?P<steps>{_N}) \[[\d:]{{4,12}}<", "progress"),
    Mark("transfer", ("B/s]",), r"\d[\d.]{0,9}[kKMGT]?i?B?/\d[\d.]{0,9}[kKMGT]?i?B? \[[\d:]{4,12}<[^\]]{0,40}B/s\]", "progress"),
    Mark("step", ("step", "Step", "iteration", "Iter", "iter", "Epoch", "epoch"),
         rf"\b(?:[Gg]lobal[_ ])?(?:[Ss]tep|[Ii]ter(?:ation)?)[ :=\[#]{{1,6}}(?P<step>{_N})(?: ?(?:/|of) {{0,9}}(?P<steps>{_N}))?\b", "progress"),
    Mark("log_row", ("'loss': ", '"loss": '), r"['\"]loss['\"]: ['\"]?(?P<loss>[\w.+-]{1,30})", "progress"),
    Mark("epoch_row", ("Epoch ",), rf"^\W{{0,4}}(?:Train(?:ing)? )?Epoch:? {{0,3}}\[?(?P<epoch>{_N})(?:/(?P<epochs>{_N}))?", "progress"),
    Mark("preparing", ("examples/s]", "Running tokenizer", "Tokenizing", "Generating ", "Downloading", "Map", "Filter", "Grouping texts", "Packing", "Preprocessing", "Converting format", "tokenizing", "preprocessing", "reprocess"),
         r"(?:Running tokenizer on|Tokenizing|Map|Filter|Grouping texts|Packing|Preprocessing|Converting format|Generating \w{1,40} split|Downloading|tokenizing|preprocessing|[Bb]uilding (?:dataset|index|cache))", "progress"),
    Mark("loading", ("Loading checkpoint shards", "Loading weights", "Fetching "), r"(?:Loading checkpoint shards|Loading weights|Fetching \d{1,6} files): ", "progress"),
    Mark("saving", ("Saving model checkpoint", "Saving checkpoint", "saving checkpoint", "Saving state", "Writing ", "writing ", "Saving full", "Uploading ", "uploading "),
         r"[Ss]aving (?:model |full |final |\w{1,20}[ -])?checkpoint|Saving state|[Ww]riting (?:\w{1,20} ){0,2}(?:shards?|checkpoint)\b|[Uu]ploading (?:\w{1,20} ){0,2}(?:shards?|checkpoint)\b", "progress"),
    Mark("evaluating", ("***** Running Evaluation", "Running evaluation", "Evaluating", "Validation DataLoader"), r"Running [Ee]valuation|Evaluating|Validation DataLoader", "progress"),
    # The network.
    Mark("bootstrap", ("Bootstrap : Using ", "Bootstrap: Using ", "NET/Socket : Using"), r"(?:Bootstrap ?: Using |NET/Socket : Using )(?:\[\d{1,2}\])?(?P<interface>[\w.@-]{1,40}):(?P<address>[\w.:]{2,60})"),
    Mark("nccl_version", ("NCCL version ",), r"NCCL version (?P<version>\d{1,2}\.\d{1,3}(?:\.\d{1,3})?)(?:\+(?P<cuda>cuda[\d.]{2,8}))?$"),
    Mark("version", ("torch", "transformers", "ray", "python"), r"^\W{0,4}(?P<name>torch|transformers|ray|python|accelerate|deepspeed|datasets|peft|trl)(?: version)?[ :=]{1,3}(?P<version>\d{1,3}\.\d{1,3}[\w.+]{0,30})$"),
    # Whose program it is.
    Mark("made_by", ("llamafactory", "LLaMA-Factory", "llmtuner", "llama_recipes", "llama-recipes", "llama_cookbook", "/trl/", "pytorch_lightning", "lightning/", "LightningModule", "`Trainer.fit`", "GLOBAL_RANK: ",
                      "deepspeed", "[launch.py", "RayTrainWorker", "TorchTrainer", "ray/train", "accelerate", "transformers/trainer.py", "[INFO|trainer.py", "train_runtime", "Megatron", "megatron", "kohya", "sd-scripts", "sd_scripts", "train_network.py", "library/train_util", "axolotl", "torchtune",
                      "torch/distributed/run.py", "elastic"),
         r"(?P<llamafactory>llamafactory|LLaMA-Factory|llmtuner)|(?P<recipes>llama[_-](?:recipes|cookbook))|(?P<trl>/trl/)|(?P<ray>RayTrainWorker|TorchTrainer|ray/train)|(?P<lightning>pytorch_lightning|lightning/|LightningModule|`Trainer\.fit`|GLOBAL_RANK: )"
         r"|(?P<axolotl>axolotl)|(?P<torchtune>torchtune)|(?P<kohya>kohya|sd[-_]scripts|train_network\.py|library/train_util)|(?P<megatron>[Mm]egatron)|(?P<deepspeed>deepspeed\.|\[deepspeed\]|deepspeed/|\[launch\.py)"
         r"|(?P<transformers>transformers/trainer\.py|INFO\|trainer\.py|train_runtime)|(?P<accelerate>accelerate/|accelerate launch|accelerate\.)|(?P<torchrun>torch/distributed/run\.py|elastic)"),
)
# fmt: on


FIRST_KEPT, LAST_KEPT = 60, 60
"""Of the events of one signature and one rank in one log."""
EDGE_LINES = 40
"""Lines of the head and of the tail of a log that are kept."""
_TAIL_BYTES = 1 << 16
_STYLE_LINES = 60
_OBJECT_CHARS = 300
"""A collector's prefixes end within so many characters."""
_SECTIONS = (
    "Traceback (most recent call last)",
    "Exception ignored ",
    "Exception in thread",
    "Error in atexit",
    " global rank ",
)
"""What the lines below them are: a traceback, one that Python only reports, what one rank wrote."""
_SECTION = re.compile(r"-{4,} ?(?P<edge>Begin|End) global rank (?P<rank>\d{1,6}) STD")

_MARKS_BY_HINT: dict[str, list[int]] = {}
for _number, _mark in enumerate(MARKS):
    for _hint in _mark.hints:
        _MARKS_BY_HINT.setdefault(_hint, []).append(_number)
_HINTS = Hints({*_MARKS_BY_HINT, *(hint for one in all_signatures() for hint in one.hints)})
STRONG = frozenset({*_SECTIONS, *(h for s in all_signatures() if s.kind != "progress" for h in s.hints)})
WEAK = frozenset(
    {
        *(h for m in MARKS for h in m.hints),
        *(h for s in all_signatures() if s.kind == "progress" for h in s.hints),
    }
)


_NO_FIELDS: Mapping[str, str] = {}


@dataclass(slots=True)
class Scanned:
    """The contents of one log.

    Attributes:
        lines: how many; bytes: how long.
        who: whose log it is, by its name.
        events: in order.
        tracebacks: in the order of their ends.
        head: its first lines; tail: its last ones.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    who: Origin = field(default_factory=Origin)
    events: list[Event] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    head: list[Event] = field(default_factory=list)
    tail: list[Event] = field(default_factory=list)


def scan(name: str, stream: BinaryIO) -> Scanned:
    """Reads a log to its end."""
    reader = _Reader(name)
    for chunk in read_chunks(stream):
        reader.take(chunk)
    return reader.done()


class _Kept:
    """The first and the last events of one kind."""

    def __init__(self) -> None:
        self.first: list[Callable[[], Event]] = []
        self.last: deque[Callable[[], Event]] = deque(maxlen=LAST_KEPT)

    def add(self, event: Callable[[], Event]) -> None:
        """Takes one; it is made once it is known to stay."""
        (self.first if len(self.first) < FIRST_KEPT else self.last).append(event)


class _Reader:
    """Takes the chunks of one log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._out = Scanned(name, who=who_is_file(name))
        self._kept: dict[tuple[str, int | None], _Kept] = {}
        self._tracebacks = Tracebacks()
        self._prefilter = Prefilter(STRONG, WEAK)
        self._year: int | None = None
        self._style: str | None = None
        self._inner_style = ""
        self._section: int | None = None
        self._wrapping = CollectorPrefix()
        self._tail = b""
        self._tail_line = 1
        self._tail_offset = 0

    def take(self, chunk: Chunk) -> None:
        data = chunk.data
        if self._style is None:
            self._begin(data)
        else:
            self._wrapping.learn(data, self._style)
        self._out.bytes += len(data)
        self._out.lines = chunk.line + data.count(b"\n") - 1
        line, counted = chunk.line, 0
        hits = self._prefilter.hits(data)
        are_often = self._prefilter.is_often(_HEADER)
        for start, end in _segments(data, hits, self._tracebacks, are_often=are_often):
            line, counted = line + data.count(b"\n", counted, start), start
            self._look(data[start:end], chunk.offset + start, line)
        self._keep_tail(chunk)

    def done(self) -> Scanned:
        out = self._out
        events = [make() for kept in self._kept.values() for make in (*kept.first, *kept.last)]
        out.events = sorted(events, key=lambda event: event.order)
        out.tracebacks = self._tracebacks.done()
        line, offset = self._tail_line, self._tail_offset
        out.tail = self._edge(self._tail, line, offset)[-EDGE_LINES:]
        if self._tail and not self._tail.endswith(b"\n"):
            out.lines += 1
        return out

    def _begin(self, data: bytes) -> None:
        head = data[:_TAIL_BYTES].split(b"\n")[:_STYLE_LINES]
        lines = [plain(text.decode("utf-8", "replace")[:LINE_LIMIT]) for text in head]
        inner = [unwrap_json(text) for text in lines]
        self._style = find_style(
            [
                one
                for text, unwrapped in zip(lines, inner, strict=True)
                for one in (unwrapped[1] if unwrapped else [text])
            ]
        )
        self._wrapping.learn(data, self._style)
        self._inner_style = find_style(
            [
                bare
                for text in lines
                if (bare := self._wrapping.off(split_prefix(text, style=self._style)[1])) is not None
            ]
        )
        self._year = next((year for text in lines if (year := find_year(text))), None)
        self._out.head = self._edge(b"\n".join(head), 1, 0)[:EDGE_LINES]

    def _edge(self, data: bytes, line: int, offset: int) -> list[Event]:
        events = []
        for raw in data.split(b"\n"):
            for piece, order in _pieces(raw, offset, self._wrapping):
                who, text = self._split(piece)
                if text.strip():
                    events.append(self._event(piece, line, order, who, "line", "fact", year=self._year))
            line += 1
            offset += len(raw) + 1
        return events

    def _keep_tail(self, chunk: Chunk) -> None:
        data = self._tail + chunk.data
        line, offset = (self._tail_line, self._tail_offset) if self._tail else (chunk.line, chunk.offset)
        if len(data) > _TAIL_BYTES:
            cut = data.find(b"\n", len(data) - _TAIL_BYTES) + 1 or len(data) - _TAIL_BYTES
            line, offset = line + data.count(b"\n", 0, cut), offset + cut
            data = data[cut:]
        self._tail, self._tail_line, self._tail_offset = data, line, offset

    def _look(self, raw: bytes, offset: int, line: int) -> None:
        for piece, order in _pieces(raw, offset, self._wrapping):
            inner = _inner(piece)
            if inner is None:
                self._look_at(piece, order, line)
                continue
            for number, text in enumerate(inner[1]):
                self._look_at(text, order + number, line, of=inner[0], around=piece)

    def _look_at(
        self, piece: str, order: int, line: int, *, of: Origin = NO_ORIGIN, around: str = ""
    ) -> None:
        if self._year is None:
            self._year = find_year(piece)
        who, message = self._split(piece)
        if not message.strip():
            return
        if of is not NO_ORIGIN:
            who = replace(who, rank=of.rank if who.rank is None else who.rank, host=who.host or of.host)
        if who.rank is None and (named := find_rank(message)) is not None and self._names_itself(message):
            who = replace(who, rank=named)
        if " global rank " in message and (section := _SECTION.search(message)):
            self._section = int(section["rank"]) if section["edge"] == "Begin" else None
        if who.rank is None and self._section is not None:
            who = replace(who, rank=self._section)
        bare = self._wrapping.off(split_prefix(piece, style=self._style or "")[1])
        around = around or (piece if bare is not None else "")
        text = (piece if bare is None else bare)[: 4 * SHOWN_CHARS + 1]  # kept until the end of the log
        make = functools.partial(
            self._event, text, line, order, who, year=self._year, around=around[:LOOK_CHARS]
        )
        key = f"{who.rank}/{who.local_rank}/{who.pid}/{who.host}"
        self._tracebacks.feed(key, message, order, make)
        rank = who.rank if who.rank is not None else who.local_rank
        for match in _matches(message[:LINE_LIMIT]):
            kept = self._kept.get((match[0], rank))
            if kept is None:
                kept = self._kept[match[0], rank] = _Kept()
            kept.add(functools.partial(make, *match))

    def _split(self, piece: str) -> tuple[Origin, str]:
        """Whom the prefixes of a line name, and the line without them and without what a collector
        put before it.
        """
        who, text = split_prefix(piece, style=self._style or "")
        bare = self._wrapping.off(text)
        if bare is None:
            return who, text
        inner, text = split_prefix(bare, style=self._inner_style)
        return _joined(inner, who), text

    @staticmethod
    def _names_itself(text: str) -> bool:
        """Whether a rank in the words of a line is the one that speaks: torch's and trainers' own
        lines.
        """
        return "[Rank " in text or "Rank " in text[:160] or "rank" in text[:60]

    def _event(
        self,
        piece: str,
        line: int,
        order: int,
        who: Origin,
        signature: str = "exception",
        kind: EventKind = "error",
        cause: str | None = None,
        fields: Mapping[str, str] = _NO_FIELDS,
        *,
        year: int | None,
        around: str = "",
    ) -> Event:
        """The event of a line; its time may be in what is `around` it."""
        time = find_time(piece, year=year)
        if time is None and around:
            time = find_time(around, year=year)
        return Event(self._name, line, order, signature, kind, cause, shown(piece), who, time, fields)


def _segments(
    data: bytes, offsets: list[int], tracebacks: Tracebacks, *, are_often: bool
) -> Iterator[tuple[int, int]]:
    """The lines that are looked at, as (start, end): those with a hit, and all while a traceback is
    open.

    Args:
        are_often: whether there are so many tracebacks that their beginnings are no hits, except
            for the first and the last in the chunk: others are left out, and the line before one of
            these tells whether Python only reports it.
    """
    begin = 0
    while begin < len(data):
        if not tracebacks.waiting:
            index = bisect_left(offsets, begin)
            if index == len(offsets):
                return
            start = _start(data, offsets[index])
            if are_often and data.find(_HEADER, start, _line_end(data, start)) >= 0:
                start = _start(data, max(0, start - 1))
            begin = max(begin, start)
        end = _line_end(data, begin)
        if are_often and data.find(_HEADER, begin, end) >= 0 and not _has_hit(offsets, begin, end):
            tracebacks.leave()
        else:
            yield begin, end
        begin = end + 1


_HEADER = b"Traceback (most recent call last)"


def _has_hit(offsets: list[int], start: int, end: int) -> bool:
    index = bisect_left(offsets, start)
    return index < len(offsets) and offsets[index] < end


def _start(data: bytes, offset: int) -> int:
    return data.rfind(b"\n", 0, offset) + 1


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end


def _pieces(raw: bytes, offset: int, wrapping: CollectorPrefix) -> Iterator[tuple[str, int]]:
    """The pieces of a line, each with its place in the log."""
    if not offset:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    for part in raw.split(b"\r"):
        if part:
            text = part[: 4 * LINE_LIMIT].decode("utf-8", "replace")
            for number, piece in enumerate(split_pieces(text, wrapping.off)):
                yield (plain(piece) if "\x1b" in piece else piece), offset + number
        offset += len(part) + 1


def _inner(piece: str) -> tuple[Origin, list[str]] | None:
    """Whom a line that is a JSON object names and its message's lines, also within another and
    behind a collector's prefixes.
    """
    if '{"' not in piece[:_OBJECT_CHARS]:
        return None
    who, text = (NO_ORIGIN, piece) if piece.startswith('{"') else split_prefix(piece)
    unwrapped = unwrap_json(text) if text.startswith('{"') else None
    if unwrapped is None:
        return None
    inside = (
        unwrap_json(unwrapped[1][0]) if len(unwrapped[1]) == 1 and unwrapped[1][0].startswith('{"') else None
    )
    named, lines = inside or unwrapped
    outer = unwrapped[0] if inside else NO_ORIGIN
    rank = next((one.rank for one in (named, outer, who) if one.rank is not None), None)
    return replace(named, rank=rank, host=named.host or outer.host or who.host), lines


def _joined(inner: Origin, outer: Origin) -> Origin:
    """Whom both name; the inner one counts where they differ."""
    if inner == NO_ORIGIN:
        return outer
    given = {name: value for name in _WHO if (value := getattr(inner, name)) is not None}
    return replace(outer, **given)


_WHO = tuple(one.name for one in fields_of(Origin))
_Match = tuple[str, EventKind, str | None, Mapping[str, str]]


@functools.lru_cache(maxsize=256)  # several ranks print the same
def _matches(head: str) -> tuple[_Match, ...]:
    """Id, kind, cause and fields of each signature and then of each mark that matches a line."""
    hints = _HINTS.held(head)
    matches: list[_Match] = [
        (one.id, one.kind, one.cause, _fields(compiled(one.pattern).search(head)))
        for one in match_hints(head, hints)
    ]
    for number in sorted({number for hint in hints for number in _MARKS_BY_HINT.get(hint, ())}):
        mark = MARKS[number]
        if match := compiled(mark.pattern).search(head):
            kind: EventKind = mark.kind  # type: ignore[assignment]
            matches.append((mark.id, kind, None, _fields(match)))
    return tuple(matches)


def _fields(match: re.Match[str] | None) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None} if match else {}
