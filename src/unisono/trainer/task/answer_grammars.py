"""Grammars of answers, in llguidance's form of Lark: JSON by a schema, and calls of tools in the
form that a chat template writes. Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.trainer.plan.talk_messages import THOUGHT_MARKS, AnswerForm, Thought
from unisono.trainer.plan.tool_calls import CALL_MARKS

# Without a bound, a model that is unsure may write spaces without an end.
_SPACES = r"[ \n\r\t]{0,20}"
_ANY_OBJECT = {"type": "object"}
# A text beside calls: without anything that would be read as a call of another form.
_TEXT = (
    r"/(.|\n)*/ & ~/[ \n]*[\[{](.|\n)*/"
    r" & ~/(.|\n)*(<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\nAction Input:)(.|\n)*/"
)


@dataclass(frozen=True)
class CallForm:
    """How calls of tools are written.

    Attributes:
        opens: before the first call.
        name: before the name.
        arguments: between name and arguments, which are JSON.
        ends: after the arguments.
        between: calls.
        closes: after the last call.
        trigger: what begins calls in a text; empty: an answer is either text or calls.
    """

    opens: str
    name: str
    arguments: str
    ends: str
    between: str
    closes: str
    trigger: str


TAGGED = CallForm(
    "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", trigger="<tool_call>"
)
LISTED = CallForm("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]", trigger="[TOOL_CALLS]")
NAMED = CallForm("", "[TOOL_CALLS]", "[ARGS]", "", "", "", trigger="[TOOL_CALLS]")
NAMED_OBJECT = CallForm("", "[TOOL_CALLS]", "", "", "", "", trigger="[TOOL_CALLS]")
BARE = CallForm("", '{"name": "', '", "parameters": ', "}", "; ", "", trigger="")
BARE_ARGUMENTS = CallForm("", '{"name": "', '", "arguments": ', "}", "; ", "", trigger="")
ACTION = CallForm("", "Action: ", "\nAction Input: ", "", "\n", "", trigger="Action:")


def call_form_of(written: str) -> CallForm:
    """The form of calls in what a template wrote for an answer with a call; that of Hermes if it
    wrote none.
    """
    if "[TOOL_CALLS]" in written:
        after = written.partition("[TOOL_CALLS]")[2].lstrip()
        if after.startswith("["):
            return LISTED
        return NAMED if "[ARGS]" in after else NAMED_OBJECT
    if "<tool_call>" in written:
        return TAGGED
    if "Action:" in written:
        return ACTION
    if '"parameters"' in written:
        return BARE
    return BARE_ARGUMENTS if '"arguments"' in written else TAGGED


@dataclass(frozen=True)
class GrammarWriter:
    """Writes grammars for a tokenizer and a template.

    Attributes:
        special: ids of the special tokens among the marks of calls and thoughts, by text: these are
            not characters.
        form: of calls.
    """

    special: Mapping[str, int]
    form: CallForm

    def write(self, form: AnswerForm, thought: Thought) -> str:
        """The grammar of an answer."""
        calls = self._calls(form) if form.tools else {}
        rules: dict[str, str] = {**calls}
        if form.must_call:
            rules["body"] = "calls"
        elif form.schema is not None:
            rules["json"] = f"%json {_json(form.schema)}"
            rules["body"] = "json | calls" if form.tools else "json"
        elif self.form.trigger:
            rules |= self._texts_with_calls(form)
        else:
            rules["body"] = "calls | TEXT"
            rules["TEXT"] = _TEXT
        return _lark(self._thoughts(thought) | rules)

    def _thoughts(self, thought: Thought) -> dict[str, str]:
        if thought == "none":
            return {"start": "body"}
        opening, closing = (self._literal(mark) for mark in THOUGHT_MARKS)
        rules = {"start": "thought SPACE? body", "SPACE": r"/[ \n]{1,4}/"}
        if THOUGHT_MARKS[1] in self.special:
            rules |= {"thought": f"THOUGHT {closing}", "THOUGHT": r"/(.|\n)*/"}
        else:
            rules |= {"thought[lazy]": f"THOUGHT {closing}", "THOUGHT": r"/(.|\n)*/"}
        if thought == "possible":
            rules["start"] = f"({opening} thought SPACE?)? body"
        return rules

    def _calls(self, form: AnswerForm) -> dict[str, str]:
        """The rule `calls`, and `after_name_I` of each tool from its name on."""
        rules = {}
        for number, tool in enumerate(form.tools):
            function = tool["function"]
            name, arguments = str(function["name"]), function.get("parameters") or _ANY_OBJECT
            if arguments.get("type") is None and "$ref" not in arguments:
                arguments = {**arguments, "type": "object"}
            before = self._literal(_in_json(name) + self.form.arguments)
            rules[f"arguments_{number}"] = f"%json {_json(arguments)}"
            rules[f"named_{number}"] = f"{before} arguments_{number} {self._literal(self.form.ends)}"
        rules["named"] = " | ".join(f"named_{number}" for number in range(len(form.tools)))
        rules["call"] = f"{self._literal(self.form.name)} named"
        more = "" if form.one_call else f"({self._literal(self.form.between)} call)*"
        rules["calls"] = f"{self._literal(self.form.opens)} call {more} {self._literal(self.form.closes)}"
        return rules

    def _texts_with_calls(self, form: AnswerForm) -> dict[str, str]:
        """A text in which each call, from its trigger on, has the form of calls."""
        trigger, rules = self.form.trigger, {"TEXT": _TEXT}
        whole = self.form.opens + self.form.name
        if trigger in self.special:
            begins = f"TEXT {self._literal(trigger)}"
        else:
            rules["trigger[lazy]"], begins = f"TEXT {self._literal(trigger)}", "trigger"
        more = "" if form.one_call or not self.form.opens else f"({self._literal(self.form.between)} call)*"
        rest = self._literal(whole[len(trigger) :])
        rules["group"] = f"{begins} {rest} named {more} {self._literal(self.form.closes)}"
        rules["body"] = f"group{'?' if form.one_call else '*'} TEXT"
        return rules

    def _literal(self, text: str) -> str:
        """A text as terms of a rule: its special tokens by their ids."""
        marks = [mark for mark in self.special if mark in text]
        if not marks:
            return json.dumps(text, ensure_ascii=False) if text else ""
        mark = min(marks, key=text.index)
        before, _, after = text.partition(mark)
        return f"{self._literal(before)} <[{self.special[mark]}]> {self._literal(after)}"


def special_marks(tokenizer: Any) -> dict[str, int]:
    """The ids of marks that are special tokens of a tokenizer of transformers."""
    marks = {*CALL_MARKS, *THOUGHT_MARKS}
    added = tokenizer.added_tokens_decoder.items()
    return {str(token): i for i, token in added if token.special and str(token) in marks}


def _lark(rules: Mapping[str, str]) -> str:
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _json(schema: Mapping[str, Any]) -> str:
    """A schema for `%json`, with our bound of spaces."""
    settings = {"whitespace_pattern": _SPACES}
    return json.dumps({**schema, "x-guidance": settings}, ensure_ascii=False)


def _in_json(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]
