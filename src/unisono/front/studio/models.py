"""Models that the page talks to: each is the engine of `unisono serve`, loaded when it is first
asked, and unloaded when nobody has asked it for a while.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from unisono.base.messages import Message
from unisono.base.text import one_line
from unisono.front.serve.adapter_folders import AdapterFolders
from unisono.front.serve.model_process import ModelProcess
from unisono.front.serve.picture_addresses import PictureAddresses
from unisono.front.serve.server import Api, ApiKeys
from unisono.front.studio.problems import shown_problem
from unisono.trainer.plan.task_requests import RequestedModel

MOST_LOADED = 2
"""A result beside its base model."""
IDLE_S = 600.0
_LOOK_S = 5.0


@dataclass
class ChatModel:
    """A model in its process, and its answers in OpenAI's protocol.

    Attributes:
        id: its name for the protocol.
        used: when it was asked last, by the monotonic clock.
        said: the latest line while it is being loaded.
    """

    id: str
    process: ModelProcess
    api: Api
    used: float = field(default_factory=time.monotonic)
    asking: int = 0
    said: str = ""

    def to_json(self) -> dict[str, Any]:
        """What the page shows."""
        failure = self.process.failure
        state = "failed" if failure is not None else "ready" if self.process.ready.is_set() else "loading"
        return {
            "id": self.id,
            "state": state,
            "said": self.said,
            "about": self.process.facts.description,
            "reads_pictures": not self.process.facts.blind,
            "problems": [shown_problem(one) for one in failure.problems] if failure is not None else [],
        }


class Models:
    """The loaded models. All methods are called in the event loop."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self.loaded: dict[str, ChatModel] = {}

    def load(self, target: str, step: int | None) -> ChatModel:
        """The model, which may still be loading.

        Args:
            target: the absolute path of a run, or a model as a config names it.
            step: of a checkpoint; None: the result.
        """
        name = target if step is None else f"{target} @ {step}"
        known = self.loaded.get(name)
        if known is not None and known.process.failure is None:
            known.used = time.monotonic()
            return known
        self.unload(name)
        self._make_room()
        process = ModelProcess(
            RequestedModel(target, step=step),
            answers=True,
            on_message=lambda message: self._say(name, message),
            on_failure=lambda failed: None,
            on_restart=lambda error: None,
        )
        addresses = PictureAddresses.of(None, None)
        folders = AdapterFolders()
        api = Api(
            process, name=name, keys=ApiKeys(), addresses=addresses, folders=folders, created=int(time.time())
        )
        self.loaded[name] = ChatModel(name, process, api)
        process.start()
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """Ends the process of a model, if it is loaded."""
        model = self.loaded.pop(name, None)
        if model is not None:
            model.process.close()

    def close(self) -> None:
        """Ends all of them."""
        for name in list(self.loaded):
            self.unload(name)

    async def run(self) -> None:
        """Unloads models that nobody asks, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for name, model in list(self.loaded.items()):
                if not model.asking and now - model.used > self._idle_s:
                    self.unload(name)

    async def answer(self, model: ChatModel, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for a chat completion."""
        model.asking += 1
        try:
            await model.api({**scope, "path": "/v1/chat/completions", "root_path": ""}, receive, send)
        finally:
            model.asking -= 1
            model.used = time.monotonic()

    def _make_room(self) -> None:
        idle = sorted((one for one in self.loaded.values() if not one.asking), key=lambda one: one.used)
        while len(self.loaded) >= MOST_LOADED and idle:
            self.unload(idle.pop(0).id)

    def _say(self, name: str, message: Message) -> None:
        if name in self.loaded and message["kind"] in ("phase", "warning"):
            self.loaded[name].said = one_line(str(message["text"]))
