"""Signatures of trainers and of Ray: where a run stands, whether it finished, whether its workers live."""

from unisono.causes.signature import Signature

TRAINERS_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="trainer_step", hints=("it/s]", "s/it]", "'learning_rate'"),
        pattern=r"\| {0,6}\d{1,12}/\d{1,12} \[[\d:]{4,12}<|'learning_rate': ", kind="progress", cause=None, source="tqdm 4; transformers 5.23, Trainer",
        example=" 20%|██        | 810/4000 [37:48<2:28:52,  2.83s/it]", look_alike="num_train_epochs: 3",
    ),
    Signature(
        id="preparing_data", hints=("Running tokenizer on", "Map", "Generating ", "Downloading"),
        pattern=r"(?:Running tokenizer on dataset|^Map|Generating \w{1,40} split|Downloading (?:data|shards|\S{1,120}))(?: \(num_proc=\d{1,4}\))?: ", kind="progress",
        cause=None, source="datasets 5; LLaMA-Factory",
        example="Running tokenizer on dataset (num_proc=16):  12%|█▏        | 1200/10000 [00:41<05:04, 28.9 examples/s]", look_alike="Mapping of names",
    ),
    Signature(
        id="training_began", hints=("***** Running training *****",),
        pattern=r"\*{5} Running training \*{5}", kind="progress", cause=None, source="transformers 5.23, Trainer",
        example="***** Running training *****", look_alike="Running training for 3 epochs",
    ),
    Signature(
        id="trainer_finished", hints=("train_runtime", "***** train metrics *****", "Training completed. Do not forget", "raining complete", "raining finished", "raining done", "raining is done", "inished training", "one training", "model saved.", "You can now use this checkpoint", "odel successfully saved to"),
        pattern=r"['\"]train_runtime['\"]|\btrain_runtime\s{1,20}= |\*{5} train metrics \*{5}|Training completed\. Do not forget|^(?!.{0,60}\b[Ee]poch\b.{0,60}[Tt]raining ).{0,200}\b[Tt]raining (?:has |is )?(?:completed?|finished|done)(?: successfully)?(?:[.!,;: ]|$)(?! of| ?\d)|"
        r"\b[Ff]inished training\b|\b[Dd]one training(?=[.!,;]|\s{0,20}$)|^model saved\.$|saved successfully\. ?You can now use this checkpoint|\b[Mm]odel successfully saved to", kind="finished", cause=None,
        source="transformers 5.23, Trainer",
        example="{'train_runtime': '112.4', 'train_samples_per_second': '71.1', 'train_loss': '1.52', 'epoch': '3'}", look_alike="total_runtime: 12 s",
    ),
    Signature(
        id="lightning_finished", hints=("`Trainer.fit` stopped:",),
        pattern=r"`Trainer\.fit` stopped: `max_(?:epochs|steps|time)=[^`]{1,40}` reached", kind="finished", cause=None, source="Lightning 2.6, loops/fit_loop.py",
        example="`Trainer.fit` stopped: `max_epochs=3` reached.", look_alike="`Trainer.fit` stopped: KeyboardInterrupt",
    ),
    Signature(
        id="lightning_world", hints=("Starting with 1 processes", "MEMBER: 1/1"),
        pattern=r"Starting with 1 processes|GLOBAL_RANK: 0, MEMBER: 1/1\b", kind="progress", cause="single_device_nccl",
        source="Lightning 2.6, fabric/utilities/distributed.py; by itself it only says that there is one rank",
        example="Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/1", look_alike="Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/10",
    ),
    Signature(
        id="ray_worker_gone", hints=("Worker exit type", "ActorDiedError", "A worker died or was killed", "ActorUnavailableError", "RayActorError", "WorkerCrashedError", "RayletDiedError", "NodeDiedError", "has been marked dead", "OwnerDiedError",
               "died unexpectedly before finishing"),
        pattern=r"^(?!.{0,1500}exit type: INTENDED).{0,1500}(?:Worker exit type: SYSTEM_ERROR|(?:Ray)?Actor(?:Died)?Error: |A worker died or was killed while executing a task|WorkerCrashedError|RayletDiedError|NodeDiedError|has been marked dead because|OwnerDiedError|"
        r"died unexpectedly before finishing this task)", kind="death", cause="ray_worker_died",
        source="Ray 2.60, exceptions.py; https://github.com/verl-project/verl/issues/472",
        example="ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        look_alike="Worker exit type: INTENDED_USER_EXIT",
    ),
    Signature(
        id="ray_out_of_memory", hints=("ray.exceptions.OutOfMemoryError", "due to the node running low on memory", "running low on memory", "due to memory pressure"),
        pattern=r"ray\.exceptions\.OutOfMemoryError|due to (?:the )?node running low on memory|killed due to memory pressure", kind="error", cause="ray_worker_died",
        source="Ray 2.60, exceptions.py and raylet: its memory monitor killed the worker",
        example="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        look_alike="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB.",
    ),
    Signature(
        id="ray_no_room", hints=("No available node types can fulfill", "worker group startup timed out", "You asked for ", "Insufficient cluster resources", "cannot be scheduled right now", "is less than total desired GPUs", "lacement group creation timed out"),
        pattern=r"No available node types can fulfill resource request|worker group startup timed out after|You asked for \d{1,5}(?:\.\d)? (?:GPUs|cpu|CPUs)|Insufficient cluster resources|request cannot be scheduled right now|is less than total desired "
        r"GPUs|lacement group creation timed out", kind="error",
        cause="ray_resources_unsatisfiable", source="Ray 2.60, autoscaler and train/v2; with a later start of the workers it is harmless",
        example="(autoscaler +1m23s) Error: No available node types can fulfill resource request {'CPU': 2.0, 'GPU': 1.0}. Add suitable node types to this cluster to "
        "resolve this issue.",
        look_alike="Attempting to start training worker group of size 3 with the following resources: [{'GPU': 1, 'CPU': 2}] * 3",
    ),
)  # fmt: skip
