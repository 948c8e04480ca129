"""The engine: serves concurrent requests from any thread through one decode loop."""

from onward.engine.engine import Engine
from onward.engine.generation import Generation
from onward.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Generation"]
