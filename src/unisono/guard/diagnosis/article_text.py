"""Articles that explain a failure: a blog, an answered thread, a page of a knowledge base.

Their sections say more than their words: what stands under "root cause" is the cause, what stands
under "solution" the fix; general advice and the site's links to other pages say nothing of it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.guard.diagnosis.report_text import Passage

Section = Literal["", "symptom", "cause", "fix", "advice"]

_HEADING_CHARS = 60
_HEADINGS: tuple[tuple[Section, re.Pattern[str]], ...] = (
    (
        "advice",
        re.compile(
            r"预防|最佳实践|总结|小结|结语|建议$|^技术(?:背景|深度|细节|解析)|深入|扩展|延伸|展望|启示|经验"
            r"|\b(?:prevention|best practices?|conclusion|summary|takeaways?|lessons|background|further reading"
            r"|notes?|deep dive|tl;?dr)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "fix",
        re.compile(
            r"解决|修复|方案|办法|处理方法|应对|怎么改|方法[一二三四1-4]"
            r"|\b(?:fix|fixes|fixed|solutions?|workarounds?|resolution|remed(?:y|ies)|how to (?:fix|solve)"
            r"|what (?:helped|to do)|(?:accepted )?answer)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "cause",
        re.compile(
            r"原因|根源|根因|本质|为什么|问题分析|排查"
            r"|\b(?:root cause|causes?|reasons?|why|analysis|diagnosis|what happened|explanation)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "symptom",
        re.compile(
            r"现象|症状|报错|问题(?:背景|描述|概述)|错误(?:现象|信息|表现)|表现"
            r"|\b(?:symptoms?|the problem|problem|error(?: message)?|the issue|question)\b",
            re.IGNORECASE,
        ),
    ),
)
_STATES_CAUSE = re.compile(
    r"(?:根源|根因|原因|问题)(?:就)?(?:在于|是|源于|出在)|源于|导致(?:了)?这[个一]问题|经(?:过)?(?:排查|调查|分析)"
    r"|\b(?:the |root |main |real )?(?:cause|reason|culprit|problem) (?:\w{1,12} ){0,5}(?:is|was|turned out)\b"
    r"|\bcaused by\b|\bturn(?:s|ed) out\b|\bbecause\b|\bso the\b",
    re.IGNORECASE,
)
_IN_SENTENCE = re.compile(r"[。,,;!]|[.?:]$|\.\s")
"""Marks that a heading does not have."""
_SHORT_HEADING = re.compile(r"[\u4e00-\u9fff\w\s/-]{2,24}")
_NAVIGATION = re.compile(
    r"^\W{0,4}(?:related(?: (?:posts?|articles?|questions?|topics|reading|links))?|see also|read (?:more|next)"
    r"|you (?:may|might) also like|hot network questions|recommended(?: (?:for you|reading|posts))?|more from .{1,30}"
    r"|popular (?:posts|tags)|(?:leave a )?comments?|share this|tags|previous post|next post|about the author|subscribe"
    r"|(?:热门|相关|推荐|更多|猜你喜欢|精选|最新)[\u4e00-\u9fff]{0,8}|上一篇.{0,40}|下一篇.{0,40}|评论区?|登录|分享到"
    r"|关于作者|版权声明|项目推荐|热门项目推荐)\W{0,4}$",
    re.IGNORECASE,
)
"""A heading above the links of a site to its other pages."""
_LINKS_LINE = re.compile(
    r"^\W{0,4}(?:see also|related|tags|categories|相关阅读|标签|更多)\s?:", re.IGNORECASE
)
_TEASER = re.compile(
    r"(?:Python|Jinja|TypeScript|JavaScript|Java|Shell|Rust|Go|C\+\+|C|HTML|Jupyter Notebook)?\d{2,8}$"
)
_REPEATED = re.compile(r"^(.{4,60}?)\s?\1")
_IDEOGRAPHS = re.compile(r"[\u4e00-\u9fff]{4}")
_MOST_FIXES, _FIX_CHARS = 4, 300
_FORMER = re.compile(r"原来|原先|原始|\b(?:original|before|instead of|old)\b", re.IGNORECASE)
_IS_FIX = re.compile(
    r"设置|设为|使用|改|升级|降级|确保|指定|添加|删除|避免|关闭|禁用|交给|统一|减少|增大|提高|安装|更换|调整|检查|限制|固定|显式"
    r"|[A-Z_]{6,}=|\w\(|\b(?:set|use|pass|add|remove|upgrade|downgrade|install|disable|enable|change|replace|call"
    r"|guard|check|make sure|ensure|give|allow|run|start|lower|raise|increase|reduce|mask|save|load|switch)\b",
    re.IGNORECASE,
)
"""What a sentence that tells somebody to do something has."""


@dataclass(frozen=True, slots=True)
class SectionedText:
    """The passages of a text, each with the section it stands in.

    Attributes:
        sections: of each passage; empty where no heading says it.
        is_article: whether the text explains a failure: it has a cause and a fix.
    """

    passages: tuple[Passage, ...]
    sections: tuple[Section, ...]
    is_article: bool

    def fixes(self) -> list[Passage]:
        """What an article gives as the fix, in its order."""
        if not self.is_article:
            return []
        fixes: list[Passage] = []
        before = ""  # the sentence that introduces a line of code
        for passage, section in zip(self.passages, self.sections, strict=True):
            text = passage.text.strip()
            if section != "fix" or _heading_of(passage):
                before = ""
            elif passage.kind == "prose":
                if _IS_FIX.search(text) and not text.endswith(":"):
                    fixes.append(passage)
                before = text if text.endswith(":") else ""
            elif before and not _FORMER.search(before) and passage.kind == "log":
                fixes.append(passage)
                before = ""
        return [fix for fix in fixes if len(fix.text) <= _FIX_CHARS][:_MOST_FIXES]


def sectioned(passages: Sequence[Passage]) -> SectionedText:
    """The text in sections; its title opens none."""
    rows = passages
    title = passages[0].line if passages else 0
    sections: list[Section] = []
    current: Section = ""
    for passage in rows:
        heading = "" if passage.line == title else _heading_of(passage)
        if heading:
            current = heading
        states = passage.kind == "prose" and _STATES_CAUSE.search(passage.text) is not None
        sections.append("cause" if states and current in ("", "symptom") else current)
    stated = [passage for passage in rows if passage.kind == "prose" and _STATES_CAUSE.search(passage.text)]
    explained = "fix" in sections and ("cause" in sections or bool(stated))
    return SectionedText(tuple(rows), tuple(sections), explained)


def _heading_of(passage: Passage) -> Section:
    """The section that a short line without the end of a sentence opens."""
    text = passage.text.strip()
    if passage.kind != "prose" or len(text) > _HEADING_CHARS or _IN_SENTENCE.search(text):
        return ""
    known: Section = next((section for section, pattern in _HEADINGS if pattern.search(text)), "")
    if known:
        return known
    is_heading = _SHORT_HEADING.fullmatch(text) and _IDEOGRAPHS.search(text)
    return "advice" if is_heading else ""


def without_navigation(passages: Sequence[Passage]) -> Iterator[Passage]:
    """The passages without links to other pages: what follows a heading of such links near the end,
    and lines that present other projects.
    """
    last = max((passage.line for passage in passages), default=0)
    end = next(
        (
            passage.line
            for passage in passages
            if passage.kind != "code" and passage.line > last / 2 and _NAVIGATION.match(passage.text.strip())
        ),
        last + 1,
    )
    for passage in passages:
        if passage.line < end and (passage.kind != "prose" or not _is_link(passage.text.strip())):
            yield passage


def _is_link(text: str) -> bool:
    """Whether a line links to other pages: a list of titles, or a title followed by its own
    description.
    """
    return bool(
        _LINKS_LINE.match(text)
        or text.count(" · ") >= 2
        or (_REPEATED.match(text) and (_TEASER.search(text) or len(text) > _HEADING_CHARS))
    )
