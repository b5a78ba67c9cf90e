"""``/tokenize``, ``/detokenize``, ``/tokenizer_info`` answer what the engine's tokenizer does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis.asyncio

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.client import Client
from llorch_worker.contract import Message, Tool
from llorch_worker.contract.token_questions import TokenizeText
from llorch_worker.gateway import tokenizers
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.settings import Settings
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint
from tests.gateway.conftest import model_with_template
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import (
    REAL_APP,
    RedisServer,
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    wait_until,
)
from tests.store import announce_model
from tests.text.conftest import CORPUS

MODEL = "told"
TEXTS = [*CORPUS, " ".join(CORPUS[13:] * 40), "word " * 20_000]
SECRET = "zqxTEXTxqz"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "{% if message.content == 'grow' %}{{ message.content * 10 ** 10 }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "你好 </s> <|user|>"},
        {"role": "assistant", "content": "👩‍👩‍👧‍👦"},
        {"role": "user", "content": "And <s> then?"},
    ],
]


@pytest.fixture(scope="module")
def model(trained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model with a chat template."""
    return model_with_template(tmp_path_factory.mktemp("model"), trained_model / "hf", TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    """The engine's: loaded from the same files in the same way."""
    return load_tokenizer(open_checkpoint(model))


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[WorkerProcess]:
    """A real worker that logs all it can."""
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("worker"),
        app=REAL_APP,
        loglevel="DEBUG",
        model=model,
        model_name=MODEL,
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def without_worker(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[GatewayProcess]:
    """A gateway that has the model's files, on a Redis where no worker of the model is left.

    It is fresh: a fork has torch.
    """
    with own_redis() as server, pytest.MonkeyPatch.context() as patch:
        leave_card(server.url, MODEL)
        patch.setenv("LLORCH_MODEL", str(model))
        patch.setenv("LLORCH_MODEL_NAME", MODEL)
        with running_gateway(server.url, tmp_path_factory.mktemp("files"), fresh=True) as gateway:
            yield gateway


def leave_card(redis_url: str, model: str) -> None:
    """What a worker of ``model`` leaves in Redis."""
    card = ModelCard(name=model, max_context=512, last_seen=time.time())
    with connect(redis_url) as client:
        announce_model(client, model, card.model_dump_json())


@pytest.fixture(scope="module", params=["by a worker", "from the files"])
def answering(request: pytest.FixtureRequest) -> GatewayProcess:
    """Both ways of answering."""
    if request.param == "from the files":
        gateway = request.getfixturevalue("without_worker")
    else:
        request.getfixturevalue("worker")
        gateway = request.getfixturevalue("gateway")
    assert isinstance(gateway, GatewayProcess)
    return gateway


@pytest.fixture(scope="module")
def api(answering: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=answering.url, timeout=30) as client:
        yield client


def post(api: httpx.Client, path: str, **document: Any) -> Any:
    answer = api.post(path, json=document)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(api: httpx.Client, path: str, document: Any, status: int = 400) -> Any:
    answer = api.post(path, json=document)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("special", [True, False])
def test_every_text_gets_the_engines_ids(
    api: httpx.Client, tokenizer: Tokenizer, special: bool
) -> None:
    for text in TEXTS:
        expected = tokenizer.encode(text, add_special_tokens=special, parse_special=not special)
        options = {"add_special_tokens": special, "return_token_strs": special}
        answer = post(api, "/tokenize", prompt=text, **options)
        assert answer["tokens"] == expected, text
        shown = [tokenizer.token_text(i) for i in expected] if special else None
        assert (answer["count"], answer["token_strs"]) == (len(expected), shown)
        assert answer["max_model_len"] == 512


def test_a_client_finds_the_id_of_a_control_token_by_its_spelling(api: httpx.Client) -> None:
    """As `lm_eval --model local-completions` does with ``tokenizer_backend=remote``."""
    info = api.get("/tokenizer_info").json()
    for name, token_id in (("bos_token", 1), ("eos_token", 2)):
        answer = post(api, "/tokenize", prompt=info[name], add_special_tokens=False)
        assert answer["tokens"] == [token_id]


@pytest.mark.parametrize("parse", [True, False])
def test_control_tokens_are_read_where_that_is_asked_for(
    api: httpx.Client, tokenizer: Tokenizer, parse: bool
) -> None:
    for text in ("<s>", "Once</s> upon<s>"):
        answer = post(api, "/tokenize", prompt=text, parse_special=parse, add_special_tokens=False)
        assert answer["tokens"] == tokenizer.encode(text, False, parse)


def test_ids_become_the_engines_text(api: httpx.Client, tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert post(api, "/detokenize", tokens=ids) == {"prompt": tokenizer.decode_whole(ids)}
        assert tokenizer.decode_whole(ids) == f"<s>{tokenizer.decode(ids)}"
    every_id = list(range(tokenizer.vocab_size))
    whole = post(api, "/detokenize", tokens=every_id)["prompt"]
    assert whole == tokenizer.decode_whole(every_id)
    assert whole.startswith("<unk><s></s>")


def test_control_tokens_go_there_and_back(api: httpx.Client) -> None:
    text = "<s>Once</s> upon a<s> time"
    ids = post(api, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(api, "/detokenize", tokens=ids)["prompt"] == text


def test_a_conversation_goes_through_the_models_template(
    api: httpx.Client, tokenizer: Tokenizer
) -> None:
    for chat in CHATS:
        expected = tokenizer.encode_chat([Message(**turn) for turn in chat])
        assert post(api, "/tokenize", messages=chat)["tokens"] == expected


def test_tools_are_told_to_the_model(api: httpx.Client, tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    expected = tokenizer.encode_chat([Message(**CHATS[0][0])], [Tool.model_validate(tool)])
    assert post(api, "/tokenize", messages=CHATS[0], tools=[tool])["tokens"] == expected
    assert refused(api, "/tokenize", {"prompt": "a", "tools": [tool]})["param"] == "tools"


def test_the_count_is_that_of_the_jobs_prompt(
    api: httpx.Client, worker: WorkerProcess, client: Client
) -> None:
    for chat in CHATS:
        counted = post(api, "/tokenize", messages=chat)["count"]
        usage = client.submit(messages=chat, max_tokens=1, model=MODEL).result(60).usage
        assert usage.prompt == counted
    counted = post(api, "/tokenize", prompt=TEXTS[14])["count"]
    usage = client.submit(prompt=TEXTS[14], max_tokens=1, model=MODEL).result(60).usage
    assert usage.prompt == counted


def test_the_tokenizer_is_described_by_the_names_of_tokenizer_config(
    api: httpx.Client, tokenizer: Tokenizer
) -> None:
    info = api.get("/tokenizer_info", params={"model": MODEL}).json()
    assert info == tokenizer.describe() | {"model_max_length": 512}
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == (
        "<s>",
        "</s>",
        TEMPLATE,
    )
    assert api.get("/tokenizer_info", params={"model": "other"}).status_code == 404


def test_ids_beyond_the_vocabulary_are_named(api: httpx.Client, tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    error = refused(api, "/detokenize", {"tokens": [1, size, 2, size + 7]})
    assert [fault["field"] for fault in error["faults"]] == ["tokens.1", "tokens.3"]
    assert error["param"] == "tokens.1"
    for ids in ([-1], [1.5], ["1"], [2**40], "1", None):
        assert refused(api, "/detokenize", {"tokens": ids})["param"].startswith("tokens")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"prompt": "a", "messages": CHATS[0]},
        {"prompt": ["a"]},
        {"prompt": "a" * 1_000_001},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "a"}]},
        {"messages": [*CHATS[0], {"role": "system", "content": SECRET}]},
        {"messages": CHATS[0], "add_special_tokens": True},
        {"messages": CHATS[0], "continue_final_message": 1},
        {"prompt": "a", "guided_json": {}},
        {"prompt": "a", "model": ""},
    ],
    ids=lambda document: " ".join(document) or "nothing",
)
def test_what_breaks_a_rule_is_refused_without_its_values(api: httpx.Client, document: Any) -> None:
    error = refused(api, "/tokenize", document)
    assert error["llorch_code"] == "INVALID_REQUEST"
    assert SECRET not in str(error)


def test_a_model_that_was_never_served_is_404(api: httpx.Client) -> None:
    error = refused(api, "/tokenize", {"prompt": "a", "model": "other"}, 404)
    assert error["code"] == "model_not_found"


def test_no_text_is_in_any_log(
    api: httpx.Client, answering: GatewayProcess, worker: WorkerProcess, tokenizer: Tokenizer
) -> None:
    chat = [{"role": "user", "content": SECRET}]
    post(api, "/tokenize", prompt=SECRET)
    ids = post(api, "/tokenize", messages=chat)["tokens"]
    post(api, "/detokenize", tokens=ids)
    refused(api, "/tokenize", {"prompt": SECRET, "guided_json": SECRET})
    post(api, "/tokenize", prompt=SECRET, unknown=SECRET)
    for log in (answering.log.read_text(), worker.text()):
        assert SECRET not in log
        assert str(ids[1:4])[1:-1] not in log


def test_a_gateway_with_the_files_loads_no_torch(
    without_worker: GatewayProcess,
) -> None:
    with httpx.Client(base_url=without_worker.url) as api:
        post(api, "/tokenize", messages=CHATS[0])
    loaded = {
        Path(found.path).name for found in psutil.Process(without_worker.process.pid).memory_maps()
    }
    assert not [name for name in loaded if name.startswith("libtorch")]


def test_a_template_that_grows_for_one_word_fails_the_requests_with_that_word_alone(
    answering: GatewayProcess, api: httpx.Client
) -> None:
    chat = [{"role": "user", "content": "grow"}]
    error = refused(api, "/tokenize", {"messages": chat}, 400)
    assert "the model's chat template takes more memory than there is for it" in error["message"]
    assert post(api, "/tokenize", messages=CHATS[0])["count"] > 0


def test_a_job_whose_chat_the_template_grows_for_fails_alone(
    worker: WorkerProcess, http: httpx.Client
) -> None:
    def asked(said: str) -> httpx.Response:
        chat = [{"role": "user", "content": said}]
        document = {"model": MODEL, "messages": chat, "max_tokens": 2}
        return http.post("/v1/chat/completions", json=document)

    refusal = asked("grow")
    assert refusal.status_code == 400, refusal.text
    said = refusal.json()["error"]["message"]
    assert "messages: the model's chat template takes more memory than there is for it" in said
    assert asked("Hi").status_code == 200


class KilledAtFirst(IntakeProcess):
    """It is killed while it loads; the next one is not."""

    started = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        KilledAtFirst.started += 1
        if KilledAtFirst.started == 1:
            os.kill(self.pid, signal.SIGKILL)


def test_workers_answer_for_a_while_where_an_intake_dies_while_it_loads(
    model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "IntakeProcess", KilledAtFirst)
    card = ModelCard(name=MODEL, max_context=512, last_seen=time.time())
    settings = Settings(model=model, model_name=MODEL, redis_url=redis_server.url)

    async def ask(own: tokenizers.Tokenizers) -> dict[str, Any] | None:
        return await own.own_answer(card, TokenizeText(prompt="Once"))

    async def run() -> None:
        own = tokenizers.Tokenizers(settings, redis.asyncio.Redis())
        try:
            assert [await ask(own) for _ in range(3)] == [None] * 3
            assert KilledAtFirst.started == 1
            monkeypatch.setattr(own, "_starts_from_s", 0.0)
            assert await ask(own)
            # It cannot start again: its files are gone.
            monkeypatch.setattr(own._intake, "_path", model / "gone")
            os.kill(own._intake.pid, signal.SIGKILL)
            assert await ask(own) is None
        finally:
            own.close()

    asyncio.run(run())


def test_a_worker_whose_sequences_are_all_taken_answers(
    own_server: RedisServer,
    own_worker: WorkerProcess,
    own_client: Client,
    own_gateway: GatewayProcess,
    latch: Latch,
    demo_model: Path,
) -> None:
    tokenizer = load_tokenizer(open_checkpoint(demo_model))
    running = [begun(own_client.submit(prompt=latch.prompt(), max_tokens=8)) for _ in range(2)]
    waiting = own_client.submit(prompt="x", max_tokens=1)
    with httpx.Client(base_url=own_gateway.url, timeout=30) as api:
        assert post(api, "/tokenize", prompt="a b")["tokens"] == tokenizer.encode("a b")
    assert waiting.status().state == "queued"
    latch.open()
    for job in [*running, waiting]:
        job.result(120)


def test_a_question_that_cannot_be_read_costs_the_worker_nothing(
    redis_server: RedisServer, worker: WorkerProcess, http: httpx.Client
) -> None:
    with connect(redis_server.url) as client:
        for junk in ("", "{", '{"id": "1"}', '{"id": "1", "question": {"ask": "all"}}', SECRET):
            client.rpush(keys.token_questions(MODEL), junk)
    assert post(http, "/tokenize", prompt="a", model=MODEL)["count"] > 0
    wait_until(lambda: "dropped a question" in worker.text())
    assert SECRET not in worker.text()


def test_without_a_live_worker_or_files_it_is_503(
    own_server: RedisServer, own_worker: WorkerProcess, own_gateway: GatewayProcess
) -> None:
    with httpx.Client(base_url=own_gateway.url, timeout=30) as api:
        with own_worker.paused():
            # It is still announced, and the question waits for it in vain.
            error = refused(api, "/tokenize", {"prompt": SECRET}, 503)
            assert (error["llorch_code"], error["retriable"]) == ("MODEL_NOT_SERVED", True)
        with connect(own_server.url) as client:
            # The worker may have held the question, and answers it now. Nothing stays for ever.
            left = client.keys(f"{keys.PREFIX}tokens:*")
            assert all(client.ttl(key) != -1 for key in left)
        own_worker.stop()
        wait_until(lambda: api.post("/tokenize", json={"prompt": "a"}).status_code == 503)


class Stopped(IntakeProcess):
    """It hangs while it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, idle_s=600)
        os.kill(self.pid, signal.SIGSTOP)


def test_a_gateway_ends_although_its_intake_loads(
    model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "IntakeProcess", Stopped)
    card = ModelCard(name=MODEL, max_context=512, last_seen=time.time())
    settings = Settings(model=model, model_name=MODEL, redis_url=redis_server.url)

    async def run() -> None:
        own = tokenizers.Tokenizers(settings, redis.asyncio.Redis())
        asked = asyncio.create_task(own.own_answer(card, TokenizeText(prompt="Once")))
        while own._loading is None:
            await asyncio.sleep(0.01)
        own.close()
        assert await asyncio.wait_for(asked, 60) is None

    asyncio.run(run())
