"""The page at / in a real browser: a chat, a branch, a reload, a server that goes away and returns."""

import contextlib
import io
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import SECONDS, LiveServer

import onward

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
Page = playwright.Page
expect = playwright.expect

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
    """A page in a context of its own. Whatever it logs as an error fails the test, but for what a test has caused."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(SECONDS * 1000 / 4)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda said: said.type == "error" and page.problems.append(said.text))
    yield page
    assert [text for text in page.problems if "net::" not in text and "401" not in text] == []
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


def content(server: LiveServer, *said: str, **fields: Any) -> str:
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    answer: str = server.post(CHAT, {"messages": messages, **fields}).json()["choices"][0]["message"]["content"]
    return answer


def test_a_chat_is_what_the_server_says_and_outlasts_a_reload(server: LiveServer, page: Any) -> None:
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
    told = page.locator("#numbers [data-name='Tokens so far']")
    expect(told).to_have_text(str(server.get("/stats").json()["demo"]["tokens"]))
    assert all(url.startswith(server.url) for url in asked)  # nothing comes from elsewhere
    page.click("#fresh")
    expect(page.locator("article")).to_have_count(0)


def test_a_text_goes_on_from_an_alternative_by_the_keyboard(server: LiveServer, page: Any) -> None:
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
    expect(page.locator(".facts")).to_contain_text("read from the cache")

    said = [{"role": "user", "content": "Tell me a story."}]
    body = {"messages": said, "max_tokens": 24, "temperature": 1, "seed": 3}
    first = server.post(CHAT, body | {"logprobs": True, "top_logprobs": 6}).json()["choices"][0]["logprobs"]["content"]
    ids = [entry["id"] for entry in first[:4]]
    other = next(top for top in first[4]["top_logprobs"] if top["id"] != first[4]["id"])
    prompt = server.post("/tokenize", {"messages": said}).json()["tokens"]
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
    page.get_by_role("button", name="The branch before").click()
    assert answered(page) == old


def _output_of(program: str) -> str:
    pytest.importorskip("openai")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(program, "copied", "exec"), {})
    return said.getvalue()


def test_an_answer_that_is_broken_off_goes_on_when_the_server_returns(lm: onward.LanguageModel, page: Any) -> None:
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
        expect(page.locator(".facts")).to_contain_text("broken off")
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
    expect(page.locator("#key-problem")).to_contain_text("does not take this key")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.select_option("#model", "drafting")
    ask(page, "Tell me a story.", seed=1, max_tokens=60, temperature=0)
    answered(page)
    accepted = re.search(r"(\d+) of \d+ drafted", page.locator(".facts").inner_text())
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
  const all = [...document.querySelectorAll("#legend .token, .note, dt, button, #trouble, .problem, .user .text")];
  return all.map((element) => {
    const pair = [getComputedStyle(element).color, back(element)].map(light).sort((a, b) => b - a);
    return [element.textContent, (pair[0] + 0.05) / (pair[1] + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_the_dark_and_on_a_phone(server: LiveServer, browser: Any, scheme: str) -> None:
    with browser.new_context(viewport={"width": 400, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(server.url)
        page.click("#settings summary")  # closed where there is little room
        ask(page, "Tell me a story.", seed=3, max_tokens=24, temperature=1)
        answered(page)
        low = [(text, ratio) for text, ratio in page.evaluate(_CONTRASTS) if ratio < 4.5]
        assert low == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.locator("article.assistant .token").nth(2).click()
        box = page.locator("#alternatives").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
