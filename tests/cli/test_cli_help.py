"""The help of each command: every option in a group, short phrases, and the defaults of the code."""

import dataclasses
import inspect
import re

import pytest
from command_line import Cli
from typer.main import get_command

import onward
from onward.cli.flags import GROUPS, EngineFlags
from onward.cli.main import app
from onward.cli.serve import ReplicaFlags, ServerFlags
from onward.server import Settings

COMMANDS = get_command(app).commands
OPTIONS = [
    pytest.param(command, param, id=f"{name} {param.opts[-1]}")
    for name, command in COMMANDS.items()
    for param in command.params
    if param.param_type_name == "option"
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_every_option_has_a_group_and_a_short_text(command, option) -> None:
    assert option.rich_help_panel in GROUPS
    text, _, default = option.help.partition(" [default: ")
    assert len(text) <= 80
    assert text.endswith((".", "]"))
    assert re.match(r"[A-Z]|[a-z0-9]+(, [a-z0-9_]+)* or ", text), "a phrase, or a list of values"
    assert not re.search(r"[(\[]\s*[(\[]|  ", option.help)
    assert default.count("]") == bool(default)


@pytest.mark.parametrize("name", COMMANDS)
def test_groups_appear_once_in_a_fixed_order(cli: Cli, name: str) -> None:
    lines = cli(name, "--help").out.splitlines()
    sections = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert sections[-1] == "Help"
    assert [group for group in GROUPS if group in sections] == [name for name in sections if name in GROUPS]
    assert set(sections) <= {"Arguments", *GROUPS, "Help"}


def test_the_list_of_commands_is_not_truncated(cli: Cli) -> None:
    out = cli("--help").out
    assert "..." not in out[out.index("Commands:") :]
    for command in COMMANDS.values():
        assert command.help.splitlines()[0] in out


def test_a_shared_option_has_one_help_text() -> None:
    # These differ on purpose: the purpose of a file, or of a default.
    exceptions = {"adapter", "dtype", "max_new_tokens", "model", "chat", "system", "file", "ids", "seed", "limit"}
    exceptions |= {"max_step_ms", "overcommit", "as_json", "batch", "address", "replicas", "prompt", "output"}
    texts: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for param in command.params:
            if param.param_type_name == "option":
                texts.setdefault(param.name, set()).add(param.help)
    assert {name for name, found in texts.items() if len(found) > 1} <= exceptions


def shown_defaults(kind: type) -> dict[str, str]:
    return {field.name: field.metadata["shown"] for field in dataclasses.fields(kind) if field.metadata["shown"]}


def test_documented_defaults_equal_the_engines() -> None:
    own = {name: each.default for name, each in inspect.signature(onward.Engine).parameters.items()}
    words = shown_defaults(EngineFlags)
    for name in ("max_sequences", "max_waiting", "max_waiting_tokens", "overcommit"):
        assert float(words[name]) == own[name]


def test_documented_defaults_equal_the_server_settings() -> None:
    flags, settings = ServerFlags(), Settings()
    same = ("max_requests", "keep_alive", "idempotency_seconds", "response_lifetime", "drain", "access_log")
    for name in (*same, "log_prompts", "otlp_endpoint"):
        assert getattr(flags, name) == getattr(settings, name)
    assert flags.max_body * 2**20 == settings.max_body
    assert flags.request_memory * 2**20 == settings.request_memory
    assert flags.response_store_size * 2**20 == settings.response_store_bytes


def test_documented_defaults_equal_the_deployment_options() -> None:
    pytest.importorskip("ray")
    from onward.cluster.ingress import RetryOptions
    from onward.cluster.options import DeployOptions

    flags, options, retries = ReplicaFlags(), DeployOptions(), RetryOptions()
    assert (flags.affinity, flags.cpus) == (options.affinity, options.cpus)
    assert (flags.attempts, flags.silence) == (retries.attempts, retries.silence)
