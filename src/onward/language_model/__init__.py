"""Language models: completions, chats, scores, sessions and quantization."""

from onward.language_model.chat import ChatReader
from onward.language_model.completion import Completion, Piece, Timing
from onward.language_model.generation_config import generation_defaults, within_vocabulary
from onward.language_model.infill import INFILL_FORMATS, infill_request
from onward.language_model.language_model import LanguageModel, Messages
from onward.language_model.logprobs import TextLogprobs
from onward.language_model.options import ChatOptionsDict, Draft, GenerateOptions, split_chat_options
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.quantize_model import Calibration, calibration_ids, quantize, quantize_folder
from onward.language_model.receipt import Receipt
from onward.language_model.request import Ids, Prompt, Request, RequestReader
from onward.language_model.runner import Runner, drained
from onward.language_model.scoring import Score, score_continuations, score_texts
from onward.language_model.session import Session
from onward.language_model.verification import Replay, Verification

__all__ = [
    "INFILL_FORMATS", "Calibration", "ChatOptionsDict", "ChatReader", "Completion", "Draft", "GenerateOptions",
    "GenerateOptionsDict", "Ids", "LanguageModel", "Messages", "Piece", "Prompt", "Receipt", "Replay", "Request",
    "RequestReader", "Runner", "Score", "Session", "TextLogprobs", "Timing", "Verification", "calibration_ids",
    "drained", "generation_defaults", "infill_request", "quantize", "quantize_folder", "score_continuations",
    "score_texts", "split_chat_options", "within_vocabulary",
]  # fmt: skip
