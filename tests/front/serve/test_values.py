"""Embeddings, scores of reward models and labels of classifiers, equal to those of transformers.

Run: pytest tests/front/serve/test_values.py
"""

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Served, start
from unisono.front.studio.models import Models
from unisono.trainer.config.heads import EmbedSection
from unisono.trainer.model.sentence_files import write_sentence_files

pytestmark = pytest.mark.slow
TEXTS = ["what day is it", "call me", "tuesday", "it is today, call me on tuesday " * 3]
TOLERANCE = 1e-5  # float32, with other texts in the same forward


@pytest.fixture(scope="module")
def servers(own_cache: None) -> Iterator[Callable[[Path], Served]]:
    """Starts a server of each model once."""
    started: dict[Path, Served] = {}

    def of(model: Path) -> Served:
        if model not in started:
            started[model] = start(model)
        return started[model]

    yield of
    for one in started.values():
        one.close()
        assert one.end() == 0
        one.process.communicate()


def embedding_model(endless: Path, directory: Path, *, is_mean: bool) -> Path:
    """A model of sentence-transformers."""
    shutil.copytree(endless, directory)
    section = EmbedSection(
        pooling="mean" if is_mean else "last",
        normalize=not is_mean,
        query_prefix="ask: ",
        document_prefix="doc: ",
    )
    write_sentence_files(directory, section, hidden_size=32, max_length=60)
    return directory


@pytest.fixture(scope="module")
def embedders(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that pool the last token and normalize, and the mean."""
    directory = tmp_path_factory.mktemp("embedders")
    return {
        name: embedding_model(endless, directory / name, is_mean=name == "mean") for name in ("last", "mean")
    }


def with_head(endless: Path, directory: Path, labels: list[str]) -> Path:
    """A model with a head of random weights: a reward model without labels."""
    names: dict[str, Any] = {}
    if labels:
        names = {"id2label": dict(enumerate(labels)), "problem_type": "single_label_classification"}
        names["label2id"] = {name: number for number, name in enumerate(labels)}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            endless, num_labels=len(labels) or 1, pad_token_id=0, **names
        )
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(endless).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def judge(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(endless, tmp_path_factory.mktemp("judge") / "reward", [])


@pytest.fixture(scope="module")
def labeller(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(endless, tmp_path_factory.mktemp("labeller") / "labels", ["day", "call", "other"])


def embedding(directory: Path, text: str) -> torch.Tensor:
    """The embedding of a text alone, by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        states = model(
            **tokenizer(text, truncation=True, max_length=60, return_tensors="pt")
        ).last_hidden_state[0]
    if directory.name == "mean":
        return states.mean(0)
    return torch.nn.functional.normalize(states[-1], dim=-1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(
    servers: Callable[[Path], Served], embedders: dict[str, Path], pooling: str
) -> None:
    directory = embedders[pooling]
    served = servers(directory)
    texts = TEXTS[:3]
    reply = served.client.embeddings.create(
        model=served.model, input=texts
    )  # as base64, which the client reads
    assert [one.index for one in reply.data] == [0, 1, 2]
    for text, one in zip(texts, reply.data, strict=True):
        assert one.embedding == pytest.approx(embedding(directory, text).tolist(), abs=TOLERANCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    plain = served.post("/v1/embeddings", input=ids, encoding_format="float", temperature=0).body
    assert plain["error"]["param"] == "temperature"
    plain = send(served, "/v1/embeddings", input=ids, encoding_format="float")["data"]
    packed = send(served, "/v1/embeddings", input=ids[0], encoding_format="base64")["data"]
    assert [one["embedding"] for one in plain] == [
        pytest.approx(one.embedding, abs=TOLERANCE) for one in reply.data
    ]
    numbers = np.frombuffer(base64.b64decode(packed[0]["embedding"]), "<f4")
    assert numbers.tolist() == pytest.approx(reply.data[0].embedding, abs=TOLERANCE)
    asked = send(served, "/v1/embeddings", input=texts[0], input_type="query")["data"][0]["embedding"]
    assert asked == pytest.approx(embedding(directory, "ask: " + texts[0]).tolist(), abs=TOLERANCE)


def send(served: Served, path: str, **body: Any) -> dict[str, Any]:
    reply = served.send(path, json.dumps({"model": served.model, **body}))
    assert reply.status == 200, reply
    return reply.body


@pytest.mark.long  # sentence-transformers is not a part of `dev`
def test_embeddings_are_those_of_sentence_transformers(
    servers: Callable[[Path], Served], embedders: dict[str, Path]
) -> None:
    sentence = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    for directory in embedders.values():
        model = sentence.SentenceTransformer(str(directory), device="cpu")
        body = {"input": TEXTS, "encoding_format": "float", "truncate_prompt_tokens": -1}
        ours = [one["embedding"] for one in send(servers(directory), "/v1/embeddings", **body)["data"]]
        assert np.abs(np.array(ours) - model.encode(TEXTS)).max() < TOLERANCE


def test_a_request_for_embeddings_is_refused_by_its_parameter(
    servers: Callable[[Path], Served], embedders: dict[str, Path]
) -> None:
    served = servers(embedders["last"])
    for body, status, param in (
        ({"input": "a", "dimensions": 8}, 400, "dimensions"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": [5, 9_999]}, 400, "input"),
        ({"input": "day " * 100}, 413, "input"),
        ({"input": [[5] * 61]}, 413, "input"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "model"),
    ):
        reply = served.send("/v1/embeddings", json.dumps({"model": served.model, **body}))
        assert (reply.status, reply.body["error"]["param"]) == (status, param), reply
    assert send(served, "/v1/embeddings", input="a", dimensions=32)
    for path in ("/v1/completions", "/v1/chat/completions", "/classify"):
        reply = served.send(path, json.dumps({"model": served.model, "prompt": "a"}))
        assert reply.status == 404
        assert "embedding model" in reply.body["error"]["message"]


def test_texts_of_many_requests_share_forwards_and_stay_their_own(
    servers: Callable[[Path], Served], embedders: dict[str, Path]
) -> None:
    served = servers(embedders["last"])
    alone = {text: send(served, "/v1/embeddings", input=text)["data"][0]["embedding"] for text in TEXTS[:3]}
    requests = [[TEXTS[i % 3], TEXTS[(i + 1) % 3]] * (1 + 200 * (i == 4)) for i in range(24)]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda texts: send(served, "/v1/embeddings", input=texts)["data"], requests))
    for texts, data in zip(requests, replies, strict=True):
        assert len(data) == len(texts)
        for text, one in zip(texts[:2], data[-2:], strict=True):
            assert one["embedding"] == pytest.approx(alone[text], abs=TOLERANCE)


def test_similarities_of_pairs_are_cosines(
    servers: Callable[[Path], Served], embedders: dict[str, Path]
) -> None:
    for directory in embedders.values():
        data = send(servers(directory), "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:3])["data"]
        first = embedding(directory, TEXTS[0])
        for one, text in zip(data, TEXTS[1:3], strict=True):
            cosine = torch.nn.functional.cosine_similarity(first, embedding(directory, text), dim=0)
            assert one["score"] == pytest.approx(float(cosine), abs=TOLERANCE)


def test_scores_of_a_reward_model_are_those_of_transformers(
    servers: Callable[[Path], Served], judge: Path
) -> None:
    served = servers(judge)
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
    answers = ["it is tuesday", "call me", "today"]
    body = send(served, "/v1/score", text_1=TEXTS[0], text_2=answers)
    total = 0
    for one, answer in zip(body["data"], answers, strict=True):
        messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": answer}]
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        total += inputs["input_ids"].shape[1]
        with torch.no_grad():
            assert one["score"] == pytest.approx(float(model(**inputs).logits), abs=TOLERANCE)
    assert body["usage"]["total_tokens"] == total
    pairs = send(served, "/score", text_1=[TEXTS[0], TEXTS[1]], text_2=answers[:2])["data"]
    assert pairs[0]["score"] == pytest.approx(body["data"][0]["score"], abs=TOLERANCE)
    reply = served.send(
        "/v1/score", json.dumps({"model": served.model, "text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    )
    assert (reply.status, reply.body["error"]["param"]) == (400, "text_1")


def test_labels_of_a_classifier_are_those_of_transformers(
    servers: Callable[[Path], Served], labeller: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(labeller)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(labeller).eval()
    data = send(servers(labeller), "/classify", input=TEXTS)["data"]
    for one, text in zip(data, TEXTS, strict=True):
        with torch.no_grad():
            probs = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        assert one["probs"] == pytest.approx(probs.tolist(), abs=TOLERANCE)
        assert one["label"] == model.config.id2label[int(probs.argmax())]
        assert one["num_classes"] == 3


def test_adapters_are_for_models_that_write_answers(judge: Path, embedders: dict[str, Path]) -> None:
    for model in (judge, embedders["last"]):
        words = [sys.executable, "-m", "unisono", "serve", model, "--adapter", f"one={model}"]
        done = front_server.run([str(word) for word in words], timeout=LIMIT_S)
        assert done.returncode == 2
        assert "writes" in done.stderr


def test_the_studio_does_not_load_what_writes_no_answers(
    embedders: dict[str, Path], judge: Path, labeller: Path, own_cache: None
) -> None:
    async def refusals() -> list[dict[str, dict[str, str]]]:
        models = Models()
        found = []
        for target in (embedders["last"], judge, labeller):
            model = models.load(str(target), None)
            await asyncio.wait_for(model.process.ended.wait(), LIMIT_S)
            shown = model.to_json()
            assert shown["state"] == "failed"
            found += shown["problems"]
        models.close()
        return found

    embeds, rates, labels = asyncio.run(refusals())
    assert "is an embedding model: it writes no answers" in embeds["what"]["en"]
    assert "is a reward model" in rates["what"]["en"]
    assert "is a classifier: it labels texts and writes no answers" in labels["what"]["en"]
    assert all(one["fix"] for one in (embeds, rates, labels))
