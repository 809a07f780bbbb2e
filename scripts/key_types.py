"""The type of a config key and the values that it takes, in plain words of English or Chinese.

Used by scripts/config_page.py.
"""

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from page_parts import Translate
from unisono.trainer.config.yaml_file import Takes

_WORDS = {
    "en": {"int": "integer", "float": "number", "str": "text", "bool": "`true` or `false`", "null": "`null`", "or": " or ", "one": "one of {}", "list": "list (each item: {})",
           "map": "mapping of names to texts", "section": "section", "join": ", ", "comma": ", ", "full": "not empty", "long": "of {} items", "between": "from {} to {}", "least": "{} or more",
           "most": "at most {}", "above": "above {}", "below": "below {}", "and": ", ", "pair": "list of {} numbers"},
    "zh": {"int": "整数", "float": "数值", "str": "文本", "bool": "`true` 或 `false`", "null": "`null`", "or": "或", "one": "{} 之一", "list": "列表（每项：{}）",
           "map": "名称到文本的映射", "section": "配置节", "join": "、", "comma": "，", "full": "不能为空", "long": "共 {} 项", "between": "{} 到 {}", "least": "不小于 {}",
           "most": "不大于 {}", "above": "大于 {}", "below": "小于 {}", "and": "，", "pair": "{} 个数值的列表"},
}  # fmt: skip
_NAMES = {int: "int", float: "float", str: "str", bool: "bool", NoneType: "null"}


def type_of(field: FieldInfo, t: Translate, language: str) -> str:
    """E.g. `integer, 1 or more`, or `one of a, b`."""
    return _Words(t, language).of(field.annotation, list(field.metadata))


class _Words:
    """Describes types in one language."""

    def __init__(self, t: Translate, language: str) -> None:
        self._t, self._words = t, _WORDS[language]

    def of(self, annotation: Any, metadata: list[Any]) -> str:
        """A type with its bounds."""
        if get_origin(annotation) is Annotated:
            inner, *more = get_args(annotation)
            return self.of(inner, [*metadata, *more])
        metadata = [
            part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        if texts := [item.text for item in metadata if isinstance(item, Takes)]:
            return self._takes(texts[0])
        if get_origin(annotation) in (Union, UnionType):
            members = sorted(get_args(annotation), key=lambda member: member is NoneType)
            return self._either(
                [self.of(member, [] if member is NoneType else metadata) for member in members]
            )
        bounds = self._bounds(metadata)
        return self._one(annotation) + (f"{self._words['comma']}{bounds}" if bounds else "")

    def _either(self, parts: list[str]) -> str:
        """`a, b or c`; after a part that has a comma, a comma stands before the last one, too."""
        comma, joint = self._words["comma"], self._words["or"]
        before = comma.join(parts[:-1])
        before += comma.rstrip() if comma in before else ""
        gaps = [" " if code == "`" and " " not in joint else "" for code in (before[-1], parts[-1][0])]
        return f"{before}{gaps[0]}{joint}{gaps[1]}{parts[-1]}"

    def _takes(self, text: str) -> str:
        """The words of the schema; a list of names in it is not translated."""
        match = re.fullmatch(r"one of ((?:`[^`]+`, )*`[^`]+`)(?: or (.*))?", text)
        if match is None:
            return self._t(text)
        names = self._words["one"].format(self._words["join"].join(match[1].split(", ")))
        return self._either([names, self._t(match[2])]) if match[2] else names

    def _one(self, annotation: Any) -> str:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            words = [f"`{word}`" for word in arguments]
            return words[0] if len(words) == 1 else self._words["one"].format(self._words["join"].join(words))
        if origin is list:
            return self._words["list"].format(self.of(arguments[0], []))
        if origin is dict:
            return self._words["map"]
        if origin is tuple:
            return self._words["pair"].format(len(arguments))
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self._words["section"]
        return self._words[_NAMES[annotation]]

    def _bounds(self, metadata: list[Any]) -> str:
        least = next((item.ge for item in metadata if isinstance(item, Ge)), None)
        most = next((item.le for item in metadata if isinstance(item, Le)), None)
        parts = []
        if least is not None and most is not None:
            parts.append(self._words["between"].format(_number(least), _number(most)))
        elif least is not None:
            parts.append(self._words["least"].format(_number(least)))
        elif most is not None:
            parts.append(self._words["most"].format(_number(most)))
        parts += [self._words["above"].format(_number(item.gt)) for item in metadata if isinstance(item, Gt)]
        parts += [self._words["below"].format(_number(item.lt)) for item in metadata if isinstance(item, Lt)]
        lengths = [item.max_length for item in metadata if isinstance(item, MaxLen)]
        if any(isinstance(item, MinLen) for item in metadata):
            parts.append(self._words["long"].format(lengths[0]) if lengths else self._words["full"])
        return self._words["and"].join(parts)


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
