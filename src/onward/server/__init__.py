"""The HTTP server: OpenAI's endpoints over Onward engines. It needs the extra `onward[serve]` (docs/serving.md)."""

from onward.server.app import App, create_app
from onward.server.lifecycle import bound, run
from onward.server.log import log_to_stderr
from onward.server.on_demand import OnDemand
from onward.server.service import check_response_store
from onward.server.settings import Settings

__all__ = ["App", "OnDemand", "Settings", "bound", "check_response_store", "create_app", "log_to_stderr", "run"]
