"""The console in a real browser: what an operator does there, and what the page must never do."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any
from urllib.parse import urlsplit

import pytest

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.jobs import claims, dead_letters, journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.client import Client
from llorch_worker.contract import InternalError, Started, Tokens
from llorch_worker.gateway.keys import new_key
from tests.broker.steps import TERMS, take
from tests.gateway.consoles import GUEST, OPERATOR, console_gateway
from tests.gateways import GatewayProcess
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.store import add_letter, clear_letters

playwright = pytest.importorskip("playwright.sync_api", reason="needs Python's playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")

QUICK_LEASE = {"lease_s": 3, "sweep_s": 0.5, "TOY_STEP_MS": 5, "model_name": "toy"}
PATIENCE_MS = 30_000
EVIL = "<img src=x onerror=alert(1)>"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--process-per-site",
]  # fmt: skip


@dataclass
class Fleet:
    """A gateway with keys, and the worker that lives."""

    gateway: GatewayProcess
    start_worker: Callable[[str], WorkerProcess]
    worker: WorkerProcess


@pytest.fixture(scope="module")
def fleet(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("console")
    with ExitStack() as stack:

        def start(name: str) -> WorkerProcess:
            log = folder / f"{name}.log"
            worker = WorkerProcess(redis_server.url, log, name=name, **QUICK_LEASE)
            stack.callback(worker.stop)
            return worker

        first = start("w1")
        gateway = stack.enter_context(console_gateway(redis_server.url, folder))
        yield Fleet(gateway, start, first.wait_ready())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def shared(browser: Any, fleet: Fleet) -> Any:
    """A context for all visits, with a page that keeps their process: a new one costs a second.
    Each visit has a page of its own, and with it a session of its own."""
    context = browser.new_context()
    context.new_page().goto(f"{fleet.gateway.url}/health")
    return context


@dataclass
class Visit:
    """A page and what it did: its console's messages, and every request."""

    page: Any
    origin: str
    faults: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def see(self, selector: str, text: str) -> None:
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)

    def ask(self, prompt: str, *, tokens: int = 10, plain: bool = True) -> None:
        """Sends a prompt, by default as it is: the toy obeys prompts, and no chats."""
        self.set("max_tokens", str(tokens))
        self.page.locator("[name=plain]").set_checked(plain)
        self.page.get_by_label("Message", exact=True).fill(prompt)
        self.page.get_by_role("button", name="Send").click()

    def set(self, name: str, value: str) -> None:
        self.page.evaluate("() => { document.getElementById('settings').open = true }")
        self.page.locator(f"#settings-form [name={name}]").fill(value)

    def text(self) -> str:
        """The last answer's."""
        return str(self.page.locator(".output").last.text_content())

    def open(self, view: str) -> None:
        self.page.evaluate("view => { location.hash = view }", f"#/{view}")

    def check(self) -> None:
        assert not self.faults
        assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in self.urls} == {
            self.origin
        }
        assert self.page.title() == "llorch console"


@pytest.fixture
def visit(browser: Any, shared: Any, fleet: Fleet) -> Iterator[Callable[..., Visit]]:
    """Opens the console, with a key. At the end nothing may have gone wrong or left the origin.

    ``alone`` is for what a page shares with its context, such as a clock.
    """
    with ExitStack() as opened_here:
        visits = []
        shared.pages[0].evaluate("() => localStorage.clear()")

        def opened(key: str | None = OPERATOR[0], *, alone: bool = False) -> Visit:
            context = shared
            if alone:
                context = browser.new_context()
                opened_here.callback(context.close)
            page = context.new_page()
            opened_here.callback(page.close)
            if key is not None:
                page.add_init_script(f"sessionStorage.setItem('llorch-key', '{key}')")
            made = Visit(page, fleet.gateway.url)
            page.on("console", lambda note: made.faults.append(f"{note.type}: {note.text}"))
            page.on("pageerror", lambda error: made.faults.append(str(error)))
            page.on("request", lambda request: made.urls.append(request.url))
            visits.append(made)
            page.goto(made.origin)
            return made

        yield opened
        for each in visits:
            each.check()


def write(client: Client, claim: Claim, *events: Started | Tokens) -> None:
    """Writes events as the worker that holds the claim does."""
    page = journal.read(client.redis, claim.job_id)
    with client.redis.pipeline() as pipe:
        scripts.load(client.redis, "append")
        journal.queue_append(pipe, claim, page.next_entry, events)
        pipe.execute()


def words(number: int) -> str:
    return "".join(f"w{i} " for i in range(number))


def test_a_prompt_is_submitted_and_its_tokens_come_as_they_are_made(
    fleet: Fleet, visit: Callable[..., Visit], latch: Latch
) -> None:
    here = visit()
    here.ask(latch.prompt(after=4), tokens=9)
    here.see(".output", words(4).strip())
    assert here.text() == words(4)
    here.see("#state", "Generating")
    latch.open()
    here.see("#state", "Finished: length")
    assert here.text() == words(9)
    # Neither the prompt nor the text is in an address, a title or the browser's storage.
    kept = here.page.evaluate("() => JSON.stringify([{...sessionStorage}, {...localStorage}])")
    assert "wait" not in f"{here.urls} {kept} {here.page.title()}"
    assert here.page.url == f"{fleet.gateway.url}/"
    here.open("jobs?state=ended")
    here.see("#ended-list", fleet.worker.hostname)


def test_a_job_that_waits_shows_its_position(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    with fleet.worker.paused():
        first = client.submit(prompt="x", max_tokens=1)
        here = visit()
        here.ask("x", tokens=1)
        here.see("#state", "Queued: behind 1 job")
        first.cancel()
    here.see("#state", "Finished")


def test_a_job_is_cancelled_by_a_click_and_by_a_key(
    fleet: Fleet, visit: Callable[..., Visit], make_latch: Callable[[str], Latch]
) -> None:
    here = visit()
    for end, stop in {
        "click": lambda: here.page.get_by_role("button", name="Stop").click(),
        "key": lambda: here.page.locator("#prompt").press("Escape"),
        "another view": lambda: (here.open("fleet"), here.page.keyboard.press("Escape")),
    }.items():
        here.open("chat")
        latch = make_latch(end)
        here.ask(latch.prompt(after=2))
        here.see("#state", "Generating")
        here.see(".output >> nth=-1", "w1")
        stop()
        here.see("#state", "Cancelled")
        latch.wait_ended(1)


def test_a_text_goes_on_after_the_death_of_its_worker_and_of_the_connection(
    fleet: Fleet, visit: Callable[..., Visit], latch: Latch
) -> None:
    here = visit()
    here.ask(latch.prompt(after=5), tokens=12)
    here.see(".output", "w4")
    fleet.worker.process.kill()
    fleet.worker.process.wait()
    here.see("#state", "Paused")
    fleet.worker = fleet.start_worker("w2")
    # A page that is loaded again finds its job, and begins where the job began.
    here.page.reload()
    here.see(".output", words(5).strip())
    here.see(".log", "attempt 2 on w2@test")
    # What came before says nothing about the speed, and the time counts from the submit.
    assert "/s" not in str(here.page.locator(".answer .figures").text_content())
    here.see(".log", "earlier attempt 1 on w1@test")
    latch.open()
    here.see("#state", "Finished")
    assert here.text() == words(12)


def test_one_job_is_submitted_however_often_it_is_asked_for(
    visit: Callable[..., Visit], latch: Latch
) -> None:
    here = visit()
    here.page.locator("[name=plain]").evaluate("box => { box.checked = true }")
    here.page.locator("#prompt").fill(latch.prompt(after=2))
    here.page.locator("#prompt").focus()
    for _ in range(3):
        here.page.keyboard.down("Enter")
    form = "document.getElementById('chat-form')"
    here.page.evaluate(f"() => [0, 1].map(() => {form}.requestSubmit())")
    here.see(".output", "w1")
    here.page.keyboard.press("Enter")
    assert sum(url.endswith("/v1/jobs?stream=true") for url in here.urls) == 1
    here.page.locator("#prompt").press("Escape")
    here.see("#state", "Cancelled")


def test_a_submit_whose_answer_was_lost_makes_no_second_job(visit: Callable[..., Visit]) -> None:
    here = visit()
    lost = []

    def lose(route: Any) -> None:
        lost.append(route.fetch().json())
        route.abort()

    here.see("#model", "toy")  # before, the form would name no model: another request
    here.page.route("**/v1/jobs*", lose, times=1)
    here.ask("x", tokens=3)
    here.see("#chat-error", "cannot be reached")
    ids = []
    for _ in range(2):
        with here.page.expect_response("**/v1/jobs*") as answer:
            if not here.page.locator("#prompt").input_value():
                here.page.locator("#prompt").fill("x")
            here.page.get_by_role("button", name="Send").click()
        ids.append(answer.value.json()["id"])
        here.see("#state", "Finished")
    # The same request is another job once it was answered.
    assert ids[0] == lost[0]["id"] != ids[1]
    here.faults.clear()  # Chromium tells of the lost answer


def test_a_long_prompt_is_no_pause(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    here = visit(alone=True)
    here.page.clock.install()
    here.page.reload()
    with fleet.worker.paused():
        here.ask("x")
        (claim,) = wait_until(lambda: take(client.redis, TERMS))
        write(client, claim, Started(worker="w", model="toy", prompt_tokens=9, queue_ms=0))
        here.see("#state", "Reading the prompt")
        here.page.clock.fast_forward(60_000)
        here.see(".answer .figures", "1 min")
        here.see("#state", "Reading the prompt")
        write(client, claim, Tokens(index=0, ids=(1,), text="a"))
        here.see("#state", "Generating")
        here.page.clock.fast_forward(60_000)
        here.see("#state", "Paused")
        claims.fail(client.redis, claim, InternalError("died"), TERMS)
        here.see("#state", "died")


def test_generated_text_and_names_stay_text(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    here = visit()
    with fleet.worker.paused():
        here.ask("x")
        # This test plays a worker whose model writes HTML.
        (claim,) = wait_until(lambda: take(client.redis, TERMS, worker=EVIL))
        events = (
            Started(worker=EVIL, model=EVIL, prompt_tokens=1, queue_ms=0),
            Tokens(index=0, ids=(1,), text=EVIL),
        )
        write(client, claim, *events)
        here.see(".output", EVIL)
        dead_letters.refuse(client.redis, claim, EVIL, InternalError(EVIL), TERMS)
        here.see("#state", EVIL)
        here.open("dead")
        here.see("#letters", EVIL)
    assert here.page.locator("main img").count() == 0
    clear_letters(client.redis)


def test_a_thought_stands_above_the_answer(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    here = visit()
    with fleet.worker.paused():
        here.ask("x")
        (claim,) = wait_until(lambda: take(client.redis, TERMS))
        events = (
            Started(worker="w", model="toy", prompt_tokens=1, queue_ms=0),
            Tokens(index=0, ids=(1,), text="", reasoning_content="Hm"),
            Tokens(index=1, ids=(2,), text="Yes", reasoning_content="m."),
        )
        write(client, claim, *events)
        here.see(".output", "Yes")
        here.see(".thoughts summary", "Thought for")
        thought = here.page.locator(".thought")
        assert (thought.text_content(), thought.is_visible()) == ("Hmm.", False)
        here.page.locator(".thoughts summary").click()
        assert thought.is_visible()
        claims.fail(client.redis, claim, InternalError("died"), TERMS)
        here.see("#state", "died")


def test_dead_letters_are_retried_and_dropped(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    with fleet.worker.paused():
        jobs = [client.submit(prompt="x", max_tokens=3) for _ in range(2)]
        # A claim leaves other workers their share, also one that has just died.
        for claim in chain.from_iterable(take(client.redis, TERMS) for _ in jobs):
            dead_letters.refuse(
                client.redis, claim, dead_letters.EXHAUSTED, InternalError("died"), TERMS
            )
    retried, dropped = (job.id for job in jobs)
    here = visit()
    here.see("#dead-badge", "2")
    here.open("dead")
    here.page.get_by_role("button", name=f"Retry job {retried[:8]}").click()
    here.see("#dead-status", "is in its queue again")
    assert jobs[0].result(timeout=60).text == words(3)

    drop = here.page.get_by_role("button", name=f"Drop job {dropped[:8]}")
    drop.click()
    here.page.get_by_role("button", name="Keep it").click()
    assert dead_letters.count(client.redis) == 1
    drop.click()
    here.page.get_by_role("button", name="Drop it").click()
    here.see("#dead-status", "is dropped")
    assert dead_letters.count(client.redis) == 0
    assert jobs[1].status().state == "failed"


def test_the_fleet_shows_queues_and_every_jobs_times(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    with fleet.worker.paused():
        jobs = [
            client.submit(prompt="x", max_tokens=2, priority=priority)
            for priority in ("low", "low", "high")
        ]
        here = visit()
        here.open("fleet")
        here.see("#queues", "Besides")  # suspects, later jobs and others
        here.see("#queues .low[role=cell]", "2 ·")
        here.see("#queues .high[role=cell]", "1 ·")
        here.see("#workers", fleet.worker.hostname)
    for job in jobs:
        job.result(timeout=60)
    # The worker tells of its jobs with its next announcement.
    here.open("jobs?state=ended")
    for job in jobs:
        here.see("#ended-list", job.id[:8])
    bar = here.page.locator("#ended-list .bar").first.get_attribute("aria-label")
    assert bar.startswith("queued ")
    # On a phone the page scrolls in one direction only.
    here.page.set_viewport_size({"width": 390, "height": 844})
    root = "document.documentElement"
    for view in ("jobs?state=ended", "jobs", "fleet", "dead", "chat"):
        here.open(view)
        assert here.page.evaluate(f"() => {root}.scrollWidth == {root}.clientWidth"), view


def test_a_worker_has_a_row_for_each_model_that_it_keeps_with_how_far_it_loads(
    fleet: Fleet, visit: Callable[..., Visit]
) -> None:
    here, loaded = visit(), chain((10, 11), repeat(12))

    def keep_two(route: Any) -> None:
        answer = route.fetch()
        document = answer.json()
        worker = document["workers"][0] | {"models": ["a", "b", "c"]}
        away = f"loads b: its jobs wait, {next(loaded)}% loaded"
        document["workers"] = [worker | {"model": "a"}, worker | {"model": "b", "away": away}]
        route.fulfill(response=answer, json=document)

    here.page.route("**/console/api/fleet*", keep_two)
    here.open("fleet")
    here.see("#workers", "b of 3")
    here.see("#workers", "12% loaded")
    rows = here.page.locator("#workers [role=row]").filter(has_text=fleet.worker.hostname)
    playwright.expect(rows).to_have_count(2)


def test_a_key_opens_the_console_and_only_an_operators_shows_the_fleet(
    fleet: Fleet, visit: Callable[..., Visit]
) -> None:
    here = visit(None)

    def sign_in(key: str) -> None:
        here.page.get_by_label("Key of this gateway").fill(key)
        here.page.get_by_role("button", name="Sign in").click()

    sign_in("llorch-wrong")
    here.see("#sign-in-error", "unknown here")
    sign_in(GUEST[0])
    here.see("#who-name", "guest")
    here.ask("x", tokens=3)
    here.see(".output", words(3).strip())
    assert here.page.get_by_role("link", name="Fleet").is_hidden()
    here.open("fleet")  # whoever may not see it stays where he is
    assert here.page.locator("#chat").is_visible()
    assert here.page.locator("#fleet").is_hidden()
    here.page.get_by_role("button", name="Sign out").click()
    here.see("#sign-in", "Sign in")
    assert here.page.evaluate("() => sessionStorage.length") == 0
    sign_in(OPERATOR[0])
    here.open("fleet")
    here.see("#workers", fleet.worker.hostname)
    assert not [url for url in here.urls if OPERATOR[0] in url or GUEST[0] in url]


def test_a_revoked_key_sees_nothing_any_more(fleet: Fleet, visit: Callable[..., Visit]) -> None:
    leaver, entry = new_key("leaver")
    file = fleet.gateway.log.parent / "keys.toml"
    known = file.read_text()
    file.write_text(f"{known}{entry}operator = true\n")
    here = visit(None)
    here.page.get_by_label("Key of this gateway").fill(leaver)
    here.page.get_by_role("button", name="Sign in").click()
    here.ask("x", tokens=3)
    here.see("#state", "Finished")
    here.open("fleet")
    here.see("#workers", fleet.worker.hostname)
    file.write_text(known)
    here.see("#sign-in-error", "was revoked")
    assert here.page.locator(".output").count() == 0
    assert fleet.worker.hostname not in str(here.page.locator("main#main").text_content())
    assert here.page.evaluate("() => sessionStorage.length") == 0
    here.faults.clear()  # Chromium tells of each 401


def test_old_figures_are_called_old(
    redis_server: RedisServer, fleet: Fleet, visit: Callable[..., Visit]
) -> None:
    here = visit()
    here.open("fleet")
    here.see("#workers", fleet.worker.hostname)
    with redis_server.paused():
        here.see("#link", "the queue does not answer")
        here.see("#age", "s old")
    playwright.expect(here.page.locator("#age")).to_have_text("", timeout=PATIENCE_MS)
    assert here.page.locator("#link").text_content() == ""
    here.faults.clear()  # Chromium tells of each 503


def test_axe_finds_nothing_in_any_view_in_light_and_dark(
    fleet: Fleet, visit: Callable[..., Visit], client: Client, latch: Latch
) -> None:
    letter = {"id": "", "reason": "malformed", "list": "llorch.toy", "attempts": 0, "history": ""}
    add_letter(client.redis, json.dumps({**letter, "at_ms": 1, "message": "x"}))
    here = visit()
    here.ask(latch.prompt(after=3), tokens=9)
    here.see(".output", "w2")
    assert faults_of(here) == []
    job = here.page.evaluate("() => sessionStorage.getItem('llorch-job')").split()[0]
    for view, selector, text in (
        ("jobs", "#job-list", job[:8]),
        (f"jobs/{job}", "#job-text", "w2"),
        ("fleet", "#workers", fleet.worker.hostname),
        ("dead", "#letters", "malformed"),
    ):
        here.open(view)
        here.see(selector, text)
        assert faults_of(here) == [], view
    here.page.locator("#letters button", has_text="Drop").click()
    assert faults_of(here) == []
    here.page.keyboard.press("Escape")
    latch.open()
    phone = visit(None)
    phone.page.set_viewport_size({"width": 390, "height": 844})
    phone.see("#sign-in", "Sign in")
    assert faults_of(phone) == []
    clear_letters(client.redis)


def faults_of(here: Visit) -> list[str]:
    """Rules that the page breaks; dark differs from light only in its colours."""
    found = []
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        here.page.emulate_media(color_scheme=scheme)
        options = {"resultTypes": ["violations"], **rules}
        for each in axe.Axe().run(here.page, options=options).response["violations"]:
            nodes = [node["html"][:200] for node in each["nodes"][:3]]
            found.append(f"{scheme}: {each['id']}: {nodes}")
    return found


def play(fleet: Fleet, client: Client, *events: Started | Tokens) -> None:
    """Answers the one job that waits as a worker does, while the real one stands still."""
    (claim,) = wait_until(lambda: take(client.redis, TERMS))
    write(client, claim, *events)
    claims.fail(client.redis, claim, InternalError("played"), TERMS)


ANSWER = """\
# Fruits

- **apple** &amp; `pear`

```python
print("a")
```

[here](https://example.org/x) [there](javascript:alert(1)) ![x](https://example.org/i.png)
<img src=x onerror=alert(1)> &#8238;turned
"""


def test_an_answers_markdown_becomes_elements_and_its_markup_stays_text(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    here = visit()
    started = Started(worker="w", model="toy", prompt_tokens=1, queue_ms=0)
    with fleet.worker.paused():
        here.ask("x\u202ey\x1b[31m", plain=False)
        pieces = [ANSWER[i : i + 7] for i in range(0, len(ANSWER), 7)]
        tokens = [Tokens(index=i, ids=(1,), text=piece) for i, piece in enumerate(pieces)]
        play(fleet, client, started, *tokens)
        here.see("#state", "played")
    output = here.page.locator(".output")
    assert output.get_by_role("heading", name="Fruits").count() == 1
    assert output.locator("li strong").text_content() == "apple"
    assert output.locator("li").text_content() == "apple & pear"
    assert output.locator("pre code").text_content() == 'print("a")\n'
    assert [link.get_attribute("href") for link in output.locator("a").all()] == [
        "https://example.org/x"
    ]
    text = here.text()
    for said in ("[there](javascript:alert(1))", EVIL, "[image: x] https://example.org/i.png"):
        assert said in text
    assert "\\u202eturned" in text
    assert here.page.locator(".said").text_content() == "x\\u202ey\\u001b[31m"
    assert here.page.locator("main img, main script, main iframe").count() == 0


def test_a_conversation_has_turns_that_are_asked_again_and_edited(
    fleet: Fleet, visit: Callable[..., Visit]
) -> None:
    here = visit()
    sent: list[Any] = []
    here.page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    here.set("system", "Be brief")
    for question in ("first", "second"):
        here.ask(question, tokens=3, plain=False)
        here.see("#state", "Finished")
        assert [turn["content"] for turn in sent[-1]["messages"]][-1] == question
    answer = words(3)
    turns = [("system", "Be brief"), ("user", "first"), ("assistant", answer), ("user", "second")]
    assert [(turn["role"], turn["content"]) for turn in sent[-1]["messages"]] == turns
    here.page.get_by_role("button", name="Again").last.click()
    here.see("#state", "Finished")
    assert sent[-1]["messages"] == sent[-2]["messages"]
    here.page.get_by_role("button", name="Edit").first.click()
    assert here.page.locator("#prompt").input_value() == "first"
    here.page.keyboard.press("Escape")
    assert here.page.locator("#editing").is_hidden()
    here.page.get_by_role("button", name="Edit").first.click()
    here.page.locator("#prompt").fill("another")
    here.page.keyboard.press("Enter")
    here.see(".said >> nth=0", "another")
    assert here.page.locator(".turn").count() == 1
    assert [turn["content"] for turn in sent[-1]["messages"]] == ["Be brief", "another"]
    here.see("#state", "Finished")
    here.page.get_by_role("button", name="New conversation").click()
    assert here.page.locator(".turn").count() == 0


def test_settings_are_remembered_and_the_rest_is_as_the_makers_set_it(
    visit: Callable[..., Visit],
) -> None:
    here = visit()
    here.see("#sampling", "temperature 0.7, top p 0.95 (the default)")
    here.set("temperature", "0.2")
    here.set("system", "Be secret")
    here.see("#sampling", "temperature 0.2 (yours); top p 0.95 (the default)")
    here.page.reload()
    here.see("#sampling", "temperature 0.2 (yours)")
    assert here.page.locator("[name=temperature]").input_value() == "0.2"
    kept = here.page.evaluate("() => JSON.stringify([{...sessionStorage}, {...localStorage}])")
    assert "secret" not in kept
    models = '{"data": [{"id": "toy", "workers": 1, "max_model_len": 64, "generation_config": %s}]}'
    config = '{"temperature": 0.6, "top_k": 20}'
    here.page.route("**/v1/models", lambda route: route.fulfill(body=models % config))
    here.page.reload()
    here.see("#sampling", "temperature 0.2 (yours); top k 20 (the model's own)")
    here.page.evaluate("() => { document.getElementById('settings').open = true }")
    here.page.get_by_role("button", name="Reset").click()
    here.see("#sampling", "temperature 0.6, top k 20 (the model's own)")
    assert here.page.locator("[name=temperature]").get_attribute("placeholder") == "0.6"


def test_a_job_is_found_opened_and_cancelled_and_the_filters_are_in_the_address(
    fleet: Fleet, visit: Callable[..., Visit], client: Client, latch: Latch
) -> None:
    runs = client.submit(prompt=latch.prompt(after=2), max_tokens=9, tenant="acme")
    here = visit()
    here.open("jobs?tenant=acme&state=running")
    row = here.page.locator("#job-list [role=row]", has_text=runs.id[:8])
    playwright.expect(row).to_contain_text(fleet.worker.hostname, timeout=PATIENCE_MS)
    playwright.expect(row).to_contain_text("acme")
    assert here.page.locator("#job-filters [name=tenant]").input_value() == "acme"
    here.page.locator("#job-filters [name=tenant]").fill("other")
    here.page.wait_for_url("**/#/jobs?state=running&tenant=other")
    assert here.page.evaluate("() => document.activeElement.name") == "tenant"
    here.see("#open-jobs", "No such job runs or waits.")
    here.page.reload()
    assert here.page.locator("#job-filters [name=tenant]").input_value() == "other"
    here.open("jobs?tenant=acme")
    here.page.get_by_role("link", name=runs.id[:8]).click()
    here.see("#job-text", "w1")
    here.see("#job-text .log", f"attempt 1 on {fleet.worker.hostname}")
    here.page.keyboard.press("Escape")
    here.see("#job-state", "Cancelled")
    latch.wait_ended(1)
    here.open("jobs/no-such-job")
    here.see("#job-error", "unknown here, has expired, or is not yours to read")
    here.faults.clear()  # Chromium tells of the 404


def test_a_guest_sees_and_opens_its_own_jobs_only(
    fleet: Fleet, visit: Callable[..., Visit], client: Client, latch: Latch
) -> None:
    others = client.submit(prompt=latch.prompt(after=1), max_tokens=9)
    here = visit(GUEST[0])
    here.ask(latch.prompt(after=1), tokens=9)
    here.see(".output", "w0")
    own = here.page.evaluate("() => sessionStorage.getItem('llorch-job')").split()[0]
    here.open("jobs")
    here.see("#job-list", own[:8])
    assert others.id[:8] not in str(here.page.locator("#jobs").text_content())
    here.open(f"jobs/{others.id}")
    here.see("#job-error", "not yours to read")
    assert here.page.locator("#job-text").text_content() != "w0"
    latch.open()
    here.faults.clear()  # Chromium tells of the 404


def test_the_last_hour_stands_on_axes_with_units(
    fleet: Fleet, visit: Callable[..., Visit], client: Client
) -> None:
    client.redis.delete(keys.HISTORY)
    for ago_min in range(59):
        point = {"at": time.time() - 60 * ago_min, "workers": 2, "running": 3, "waiting": 10_000}
        figures = {"tokens_per_s": 1234.5, "first_token_p50_ms": 80.0, "first_token_p95_ms": 1700.0}
        client.redis.rpush(keys.HISTORY, json.dumps(point | figures))
    here = visit()
    here.open("fleet")
    here.see("#history", "10,000")
    charts = here.page.locator(".chart")
    said = [chart.get_attribute("aria-label") for chart in charts.all()]
    assert "Tokens/s in the last hour: tokens/s now 1,235, at most 1,235" in said
    assert (
        "First token in the last hour: p50 now 80 ms, at most 80 ms; p95 now 1.7 s, at most 1.7 s"
        in said
    )
    legend = str(here.page.locator("#history .legend").nth(2).text_content())
    assert legend.split() == ["p50", "80", "ms", "p95", "1.7", "s"]
    assert "−40 min" in str(charts.nth(2).text_content())
    assert "2.0 s" in str(charts.nth(2).text_content())
    # Tiles of one width, and labels on one line.
    tiles = here.page.locator("#totals > div").evaluate_all("all => all.map(t => t.clientWidth)")
    assert max(tiles) - min(tiles) <= 1
    client.redis.delete(keys.HISTORY)
