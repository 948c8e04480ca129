"""The routers of this process. Ray copies the module of a router into each process, so they cannot be kept there."""

import weakref
from typing import Any

# By their deployments.
ROUTERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
