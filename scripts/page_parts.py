"""What the generated pages have in common: words of tables and headings in both languages, tables.

Sentences are translated by the catalogue of texts; here are single words, which would be translated
elsewhere, too, if they were in it.

Used by scripts/make_reference.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

Translate = Callable[[str], str]
_CHINESE = {
    # heads of tables
    "check": "检查项", "what": "比较内容", "requirement": "要求", "otherwise": "否则", "cause": "原因", "package": "软件包", "must match": "必须相同的部分", "why": "理由",
    "variable": "变量", "may differ, because": "可以不同的理由", "problem": "问题", "instead": "改为", "from": "起始版本", "up to (exclusive)": "截止版本（不含）", "fix": "解决办法",
    "source": "来源", "meaning": "含义", "suspicious": "可疑的值", "related causes": "相关原因", "key": "键", "default": "默认值", "handling": "处理方式", "note": "说明", "model": "模型",
    "name": "名称", "type": "类型", ": ": "：",
    "model type": "模型类型", "class": "类", "adapted": "适配数", "full": "全参数", "packed": "打包",
    "2 ranks": "两个 rank", "generate": "生成", "merge": "合并",
    # headings
    "Reasons": "拒绝的理由",
    "Nodes": "节点", "The network": "网络", "Prepared data": "预处理后的数据", "Ranks": "各 rank", "Versions": "版本", "Environment variables": "环境变量",
    "Suspicious settings": "可疑的设置", "Versions with known bugs": "有已知缺陷的版本", "Memory": "内存", "The formula": "估计公式",
    "Which device for which model": "什么模型用什么设备", "Files of the generation v1": "v1 一代的文件",
    "Python interface": "Python 接口", "Functions": "函数", "Config and results": "配置与结果", "Events": "事件", "Errors": "异常",
    "The keys of `Config`": "`Config` 的配置项", "The options of `train` and `stream`": "`train` 与 `stream` 的选项", "The options of `doctor`": "`doctor` 的选项",
    "Args": "参数", "Attributes": "属性", "Raises": "抛出的异常",
    # what is compared, and titles of checks
    "versions": "版本", "addresses": "地址", "cores": "核数", "clocks": "时钟", "tokenizer": "分词器", "clock": "时钟", "processors": "处理器", "MIG slices": "MIG 切片",
    "exact": "完整版本号", "minor": "次版本号", "release": "发布版本号", "major": "主版本号",
    "refused": "拒绝启动", "a warning": "警告", "not known": "未知", "none": "无",
    "as its new name": "同新名称",
    # groups of keys of other tools
    "Model": "模型", "Quantization": "量化", "Images, videos, audio": "图片、视频、音频", "Export": "导出", "Data": "数据", "Freeze": "冻结", "Preferences": "偏好训练",
    "Training method": "训练方法", "Generation": "生成", "Profiler": "性能分析", "Training": "训练", "Evaluation (its `eval` command)": "评估（它的 `eval` 命令）",
    "Hugging Face's TrainingArguments": "Hugging Face 的 TrainingArguments", "Old names": "旧名称", "Dataset file": "数据集文件", "Output": "输出", "Optimizer": "优化器",
    "Variables of train.sh": "train.sh 的变量",
}  # fmt: skip


def word(text: str, language: str) -> str:
    """A word of a table or heading."""
    return _CHINESE.get(text, text) if language == "zh" else text


def term(text: str, t: Translate, language: str) -> str:
    """A text that may be a single word."""
    return word(text, language) if text in _CHINESE else t(text)


def table(head: Iterable[str], rows: Iterable[list[str]], language: str = "en") -> list[str]:
    """A Markdown table."""
    names = [word(name, language) for name in head]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def heading(text: str, language: str) -> list[str]:
    """A heading of the second level, with empty lines around it."""
    return ["", f"## {word(text, language)}", ""]


def as_written(value: Any) -> str:
    """A value as a config file has it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if isinstance(value, bool | None) else str(value)
