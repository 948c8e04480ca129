"""The page at / in a real browser: its first view, a chat, a branch, a reload, a server that restarts."""

import contextlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import SECONDS, LiveServer

import onward

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
Page = playwright.Page
expect = playwright.expect
expect.set_options(timeout=SECONDS * 1000 / 4)

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Start = Callable[..., LiveServer]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in its own context. Errors in its log fail the test, unless the test caused them."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(SECONDS * 1000 / 4)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    yield page
    assert [text for text in page.problems if not re.search(r"net::|status of 40[01]", text)] == []
    context.close()


def ask(page: Any, text: str, **settings: Any) -> None:
    for name, value in settings.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any, at: int = -1) -> str:
    """The text of an answer when it has ended."""
    expect(page.locator("article.assistant .facts").nth(at)).to_contain_text("tokens")
    return texts(page, at)


def texts(page: Any, at: int = -1) -> str:
    tokens = page.locator("article.assistant .tokens").nth(at).locator(".token:not(.mark)")
    return "".join(tokens.evaluate_all("all => all.map(each => each.textContent)"))


def content(server: LiveServer, *texts: str, **fields: Any) -> str:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    answer: str = server.post(CHAT, {"messages": messages, **fields}).json()["choices"][0]["message"]["content"]
    return answer


def test_a_chat_shows_the_servers_answer_and_survives_a_reload(server: LiveServer, page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    first = "<b>Tell</b> me a story."
    ask(page, first, seed=7, max_tokens=30, temperature=1)
    fields = {"seed": 7, "max_tokens": 30, "temperature": 1}
    one = content(server, first, **fields)
    assert answered(page) == one
    expect(page.locator("article.user .text")).to_have_text(first)
    ask(page, "And then?")
    expect(page.locator("article.assistant")).to_have_count(2)
    two = content(server, first, one, "And then?", **fields)
    assert answered(page) == two
    shades = page.locator("article.assistant .token").evaluate_all("all => all.map(each => each.className)")
    assert all(re.match(r"token p[0-4]", shade) for shade in shades)
    page.reload()
    assert [answered(page, 0), answered(page, 1)] == [one, two]
    expect(page.locator("[name=seed]")).to_have_value("7")
    count = page.locator("#numbers [data-name='Generated tokens']")
    expect(count).to_have_text(f"{server.get('/stats').json()['demo']['tokens']:,}")
    assert all(url.startswith(server.url) for url in asked)  # nothing comes from elsewhere
    page.click("#fresh")
    expect(page.locator("article")).to_have_count(0)


def test_a_text_continues_from_an_alternative_by_keyboard(server: LiveServer, page: Any) -> None:
    page.goto(server.url)
    ask(page, "Tell me a story.", seed=3, max_tokens=24, temperature=1)
    old = answered(page)
    tokens = page.locator("article.assistant .token")
    tokens.first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives button:not(:disabled)").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(tokens.nth(4)).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .facts")).to_contain_text("Branch 2 of 2")
    new = answered(page)
    expect(tokens.nth(4)).to_be_focused()
    expect(page.locator(".facts")).to_contain_text("prompt tokens cached")

    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 1, "seed": 3}
    first = server.post(CHAT, body | {"logprobs": True, "top_logprobs": 6}).json()["choices"][0]["logprobs"]["content"]
    ids = [entry["id"] for entry in first[:4]]
    other = next(top for top in first[4]["top_logprobs"] if top["id"] != first[4]["id"])
    prompt = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    rest = server.post(TEXT, {"prompt": [*prompt, *ids, other["id"]], "max_tokens": 19, "temperature": 1, "seed": 3})
    begun = "".join(entry["token"] for entry in first[:4]) + other["token"]
    assert new == begun + rest.json()["choices"][0]["text"]
    page.click("[data-code=python]")
    expect(page.locator("#code")).to_be_visible()
    assert _output_of(page.input_value("#code-text")) == new
    page.click("#close")
    page.click("[data-code=curl]")
    expect(page.locator("#code")).to_be_visible()
    assert f"curl -N {server.url}{TEXT}" in page.input_value("#code-text")
    page.click("#close")
    page.get_by_role("button", name="Previous branch").click()
    assert answered(page) == old


def _output_of(program: str) -> str:
    pytest.importorskip("openai")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "copied", "exec"), {})
    return output.getvalue()


def test_an_interrupted_answer_continues_when_the_server_returns(lm: onward.LanguageModel, page: Any) -> None:
    def cut(route: Any) -> None:
        frames = route.fetch().text().split("\n\n")
        route.fulfill(body="\n\n".join(frames[:6]) + "\n\n", content_type="text/event-stream")

    with LiveServer({"demo": lm}) as server:
        page.goto(server.url)
        whole = content(server, "Tell me a story.", seed=5, max_tokens=20)
        page.route(f"**{CHAT}", cut)
        # Of its own it would look again at once; here the server has to be gone before.
        page.route("**/stats", lambda route: route.abort())
        ask(page, "Tell me a story.", seed=5, max_tokens=20)
        expect(page.locator(".facts")).to_contain_text("interrupted")
        assert whole.startswith(texts(page))
        assert len(texts(page)) < len(whole)
        expect(page.locator("#trouble")).to_be_visible()
        page.unroute(f"**{CHAT}")
        page.unroute("**/stats")
        port = server.port
    page.click("#retry")
    expect(page.locator("#trouble")).to_contain_text("does not answer")
    with LiveServer({"demo": lm}, port=port):
        page.click("#retry")
        expect(page.locator("#trouble")).to_be_hidden()
        expect(page.locator(".facts")).to_contain_text("20 tokens")
        assert texts(page) == whole
        page.goto("about:blank")


def test_keys_several_models_drafts_and_programs(start: Start, lm: onward.LanguageModel, page: Any) -> None:
    drafting = onward.load("demo", draft="demo-draft")
    server = start({"plain": lm, "drafting": drafting}, api_keys=("secret",))
    page.goto(server.url)
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-problem")).to_contain_text("This key is wrong")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.locator("#model").bounding_box()["width"] > 100  # the names can be read
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1280, "height": 900})
    page.select_option("#model", "drafting")
    ask(page, "Tell me a story.", seed=1, max_tokens=60, temperature=0)
    answered(page)
    accepted = re.search(r"(\d+) of \d+ draft tokens accepted", page.locator(".facts").inner_text())
    assert accepted
    assert page.locator("article .token.drafted").count() == int(accepted[1]) > 0

    page.click("[data-code=python]")
    expect(page.locator("#code")).to_be_visible()
    program = page.input_value("#code-text")
    compile(program, "copied", "exec")
    assert '"drafting"' in program
    assert "seed=1" in program
    assert "ONWARD_API_KEY" in program
    assert "secret" not in program
    page.click("#close")
    page.click("[data-code=curl]")
    assert f"curl -N {server.url}{CHAT}" in page.input_value("#code-text")
    page.click("#close")


_CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return rgb(colour)[3] === 0 ? back(element.parentElement ?? document.body) : colour;
  };
  const shown = (element) => element.checkVisibility();
  const texts = ".shade, .word, .note, h1, h2, a, dt, dd, label, button, .problem, .user .text";
  const all = [...document.querySelectorAll(texts)];
  const pairs = all.filter(shown).map((element) => [element.textContent, getComputedStyle(element).color, element]);
  for (const field of [...document.querySelectorAll("[placeholder]")].filter(shown)) {
    pairs.push([field.placeholder, getComputedStyle(field, "::placeholder").color, field]);
  }
  return pairs.map(([text, colour, element]) => {
    const pair = [colour, back(element)].map(light).sort((a, b) => b - a);
    return [text, (pair[0] + 0.05) / (pair[1] + 0.05)];
  });
}"""
# Of painted parts of answers, those that end outside the column.
_OUTSIDE = """() => [...document.querySelectorAll(".tokens")].flatMap((tokens) => {
  const { left, right } = tokens.parentElement.getBoundingClientRect();
  const rects = [...tokens.querySelectorAll(".word")].flatMap((word) => [...word.getClientRects()]);
  return rects.filter((rect) => rect.left < left - 0.5 || rect.right > right + 0.5).map((rect) => rect.right - right);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_mode_and_phones_are_supported(server: LiveServer, browser: Any, scheme: str) -> None:
    with browser.new_context(viewport={"width": 400, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#examples button").first).to_be_visible()
        contrasts = page.evaluate(_CONTRASTS)
        expect(page.locator("#panel")).to_be_hidden()  # where there is little room
        page.click("#panel-button")
        expect(page.locator("#numbers dd").first).to_be_visible()
        contrasts += page.evaluate(_CONTRASTS)
        for name, value in {"seed": 3, "max_tokens": 120, "temperature": 1}.items():
            page.fill(f"[name={name}]", str(value))
        page.click("#panel-button")
        ask(page, "Tell me a story.")
        answered(page)
        contrasts += page.evaluate(_CONTRASTS)
        assert len(contrasts) > 100
        assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []
        for width in range(320, 401, 5):  # a line breaks at a blank that has no room, at some of them
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(_OUTSIDE) == []
        page.locator("article.assistant .token").nth(2).click()
        box = page.locator("#alternatives").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400


# The last two: a phone, and 1280 x 900 at a zoom of 200 %.
@pytest.mark.parametrize("size", [(1280, 900), (1024, 768), (400, 700), (640, 450)])
def test_the_hint_is_visible_and_an_example_starts_a_chat(
    start: Start, lm: onward.LanguageModel, page: Any, size: tuple[int, int]
) -> None:
    server = start({"demo": lm}, max_new_tokens=20)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(server.url)
    expect(page.locator("#empty h2")).to_have_text("Chat with demo")
    parts = page.locator("#empty h2, #empty button, #empty p")
    assert parts.count() >= 4
    for at in range(parts.count()):
        assert parts.nth(at).evaluate(_IS_ON_TOP), parts.nth(at).inner_text()
    example = page.locator("#examples button").first
    text = example.inner_text()
    example.click()
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.locator("article.user .text")).to_have_text(text)
    assert answered(page)


_IS_ON_TOP = """(element) => {
  const { left, top, width, height } = element.getBoundingClientRect();
  return document.elementFromPoint(left + width / 2, top + height / 2) === element;
}"""


@pytest.mark.parametrize("size", [(1280, 500), (400, 500)])
def test_only_the_conversation_scrolls(
    start: Start, lm: onward.LanguageModel, page: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    accept = onward.decoding.sequence.Sequence.accept

    def slowly(sequence: Any, *token: Any) -> str:
        time.sleep(0.005)
        return accept(sequence, *token)

    monkeypatch.setattr(onward.decoding.sequence.Sequence, "accept", slowly)

    def whole(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "ignore_eos": True}))

    server = start({"demo": lm}, max_new_tokens=300)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.route(f"**{CHAT}", whole)
    page.goto(server.url)
    place = "(({ scrollTop, scrollHeight, clientHeight }) => [scrollTop, scrollHeight, clientHeight])"

    def scrolled() -> tuple[int, int, int]:
        return tuple(page.evaluate(f"{place}(document.querySelector('#conversation'))"))

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS / 4
        while not condition():
            assert time.monotonic() < deadline
            page.wait_for_timeout(20)

    ask(page, "Tell me a story.")
    wait(lambda: scrolled()[0] > 60)
    top, height, shown = scrolled()
    assert height - top - shown < 24, "it follows the text"
    page.evaluate("document.querySelector('#conversation').scrollTop = 10")
    expect(page.locator("#latest")).to_be_visible()
    wait(lambda: scrolled()[1] > height + 60)
    assert scrolled()[0] == 10, "the reader has scrolled up"
    page.click("#latest")
    assert answered(page)
    top, height, shown = scrolled()
    assert height - top - shown < 24, "it follows again"
    expect(page.locator("#latest")).to_be_hidden()
    assert page.evaluate(f"{place}(document.documentElement)") == [0, size[1], size[1]]
    for part in ("header h1", "#prompt", "#send"):
        box = page.locator(part).bounding_box()
        assert 0 <= box["y"] <= box["y"] + box["height"] <= size[1], part


def test_settings_show_the_defaults_of_the_model(start: Start, lm: onward.LanguageModel, page: Any) -> None:
    greedy = onward.load("demo-draft")
    greedy.defaults = greedy.defaults.replace(temperature=0, top_p=1.0, top_k=5)
    server = start({"demo": lm, "greedy": greedy})
    page.goto(server.url)
    for name, length in (("demo", lm), ("greedy", greedy)):
        page.select_option("#model", name)
        options = server.get(f"/v1/models/{name}").json()["default_options"]
        for field in ("temperature", "top_p", "top_k", "min_p"):
            shown = page.locator(f"[name={field}]").get_attribute("placeholder").split()
            assert float(shown[0]) == options[field] == getattr(length.defaults, field)
        assert options["max_new_tokens"] is None
        expect(page.locator("[name=max_tokens]")).to_have_attribute("placeholder", "rest of context")
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0 (greedy)")
    expect(page.locator("[name=seed]")).to_have_attribute("placeholder", "random")
    with LiveServer({"demo": lm}, max_new_tokens=77) as limited:
        page.goto(limited.url)
        expect(page.locator("[name=max_tokens]")).to_have_attribute("placeholder", "77")
        page.goto("about:blank")


def test_every_control_has_a_name_and_every_number_a_label(server: LiveServer, page: Any) -> None:
    page.goto(server.url)
    ask(page, "Tell me a story.", max_tokens=3)
    answered(page)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea, [role], svg")]
      .filter((each) => !(each.labels?.length || each.ariaLabel || each.getAttribute("aria-labelledby")
        || each.textContent.trim()) && !["alert"].includes(each.getAttribute("role")))
      .map((each) => each.outerHTML)""")
    assert unnamed == []
    assert page.locator("#numbers dt").all_inner_texts() == [
        "Generated tokens per second",
        "Prompt tokens per second",
        "Running requests",
        "Waiting requests",
        "Cache used",
        "Prompt tokens found in the cache",
        "Generated tokens",
    ]
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
        used = page.evaluate(f"[...document.querySelectorAll('[{name}]')].map((each) => each.getAttribute('{name}'))")
        assert set(used) <= set(ids)


def test_tab_reaches_the_parts_in_order(server: LiveServer, page: Any) -> None:
    page.goto(server.url)
    expect(page.locator("#examples button").first).to_be_visible()
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    examples = page.locator("#examples button").all_inner_texts()
    assert reached == ["Skip to the message box", "fresh", "conversation", *examples, "prompt", "send", reached[-1]]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.fill("#prompt", "Hi")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    answered(page)
    expect(page.locator("#send")).to_be_focused()  # it was hidden while the answer was written


def test_a_refusal_explains_what_to_do_and_the_chat_continues(server: LiveServer, page: Any) -> None:
    page.goto(server.url)
    ask(page, "word " * 3000, max_tokens=5, seed=1)
    problem = page.locator("article.assistant .problem")
    expect(problem).to_contain_text("Start a new chat, or send a shorter message.")
    ask(page, "Tell me a story.")
    expect(page.locator("article.assistant .facts").last).to_contain_text("5 tokens")
    assert texts(page) == content(server, "Tell me a story.", max_tokens=5, seed=1)
    page.get_by_role("button", name="Try again").click()
    expect(problem).to_have_count(1)
    expect(page.locator("article.assistant")).to_have_count(2)


def test_a_model_without_a_chat_template_continues_a_text(start: Start, lm: onward.LanguageModel, page: Any) -> None:
    plain = onward.LanguageModel(lm.model, lm.tokenizer, defaults=lm.defaults)
    server = start({"plain": plain})
    page.goto(server.url)
    expect(page.locator("#empty h2")).to_have_text("Let plain continue a text")
    ask(page, "The fox", max_tokens=8, seed=1)
    expect(page.locator(".facts")).to_contain_text("8 tokens")
    answer = server.post(TEXT, {"prompt": "The fox", "max_tokens": 8, "seed": 1}).json()["choices"][0]["text"]
    assert texts(page) == answer
    page.get_by_role("button", name="Continue this answer").click()
    expect(page.locator(".facts")).to_contain_text("16 tokens")
    answer = server.post(TEXT, {"prompt": "The fox", "max_tokens": 16, "seed": 1}).json()["choices"][0]["text"]
    assert texts(page) == answer


# ── /docs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_api_page_shows_each_endpoint_and_field(server: LiveServer, page: Any) -> None:
    document = server.get("/openapi.json").json()
    page.goto(f"{server.url}/docs")
    expect(page.locator("#version")).to_have_text(onward.__version__)
    paths = [path for path in document["paths"] if f"/v1{path}" not in document["paths"]]
    expect(page.locator("#index a")).to_have_count(sum(len(document["paths"][path]) for path in paths))
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    shown = page.locator("#post-v1-chat-completions .field > dt > .name").all_text_contents()
    assert set(fields) <= set(shown)
    field = page.locator("#post-v1-chat-completions .field", has=page.get_by_text("top_logprobs", exact=True)).last
    expect(field.locator(".kind")).to_have_text("integer (0 to 20)")


def test_the_api_page_finds_a_field(server: LiveServer, page: Any) -> None:
    page.goto(f"{server.url}/docs")
    page.fill("#find", "xtc_threshold")
    bodies = {"chat-completions", "completions", "responses", "messages", "responses-input-tokens"}
    expect(page.locator("main > section:visible")).to_have_count(len(bodies) + 1)  # with the first, of all endpoints
    shown = page.locator("main > section:visible").evaluate_all("all => all.map(each => each.id)")
    assert set(shown[1:]) == {f"post-v1-{name}" for name in bodies}
    assert set(page.locator(".field:visible > dt > .name").all_text_contents()) == {"xtc_threshold"}
    expect(page.locator("#get-health")).to_be_hidden()
    page.fill("#find", "/health")
    expect(page.locator("main > section:visible h2 code")).to_have_text(["/health"])
    page.fill("#find", "no such thing")
    expect(page.locator("#none")).to_be_visible()
    page.fill("#find", "")
    expect(page.locator("#get-health")).to_be_visible()
