"""Lines that say nothing of a cause and tell what a run is: its ranks, hosts, sizes, steps, launchers. In the form of signatures.

Every named group becomes a field of the event.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of line that states a fact.

    Attributes:
        id: the event's signature.
        hints: strings of which the line must hold one.
        pattern: searched in the line without its prefixes; its groups are the fields.
        kind: "fact", or "progress" and the like where that is what it is.
    """

    id: str
    hints: tuple[str, ...]
    pattern: str
    kind: str = "fact"


_N = r"\d{1,9}"

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
    Mark("bar", ("it/s]", "s/it]", "?it/s]"), rf"(?P<step>{_N})/(?P<steps>{_N}) \[[\d:]{{4,12}}<", "progress"),
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
)  # fmt: skip
