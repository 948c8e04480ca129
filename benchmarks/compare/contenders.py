"""The contenders of a comparison, with their environments and files."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoints import SHAPES, checkpoint_with_tokenizer, random_checkpoint

HOME = Path(".benchmarks")
PRECISIONS = ("bf16", "int8", "int4")
OURS = "onward"
DEFAULT_SHAPE = "qwen3-0.6b"


class NotAvailableError(RuntimeError):
    """A contender cannot take part: its environment or its model is missing."""


@dataclass(frozen=True)
class Contender:
    """One program at one precision.

    worker: the module in workers/, and the one in models/ that makes its files.
    environment: the folder under .benchmarks/peers; None for this environment.
    weights: the precision in its own words; None where it reads the checkpoint itself.
    variant: another way of running it, which the worker knows.
    shape: a name in SHAPES. All but the default are drawn where they are needed, from the config alone.
    """

    name: str
    precision: str
    worker: str
    environment: str | None = None
    weights: str | None = None
    variant: str = ""
    shape: str = DEFAULT_SHAPE

    @property
    def label(self) -> str:
        words = (self.name, self.weights or self.precision, self.variant.partition(" ")[0])
        return " ".join(word for word in words if word)

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return HOME / "peers" / self.environment / "bin" / "python"

    @property
    def installed(self) -> bool:
        return self.environment is None or (HOME / "peers" / self.environment / ".installed").is_file()

    def model(self) -> Path:
        """The files of the contender's model, converted on first use. Raises NotAvailableError."""
        if not self.installed:
            raise NotAvailableError("not installed (make peers)")
        if self.worker == "onward_drawn":
            return drawn_config(self.shape)
        if self.weights is None:
            return random_checkpoint()
        if self.worker in ("llama_cpp", "ik_llama_cpp", "onward"):  # all read the same file
            path = HOME / "models" / f"{self.shape}-llama_cpp-{self.weights}.gguf"
        else:
            path = HOME / "models" / f"{self.shape}-{self.worker}-{self.weights}"
        if not path.exists():
            self._convert(path)
        return path

    def _convert(self, path: Path) -> None:
        print(f"converting the checkpoint for {self.label} …", file=sys.stderr, flush=True)
        drawn = self.shape != DEFAULT_SHAPE and self.worker == "llama_cpp"
        source = drawn_config(self.shape) if drawn else checkpoint_with_tokenizer(self.shape, SHAPES[self.shape])
        # Under another name until it is whole.
        unfinished = path.with_name(f"unfinished-{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        module = f"benchmarks.compare.models.{'drawn_gguf' if drawn else _CONVERTERS[self.worker]}"
        log = path.with_name(f"{path.name}.log")
        with log.open("w") as output:
            # GGUF is written with the names that Onward reads it by, so by Onward's Python.
            python = sys.executable if _CONVERTERS[self.worker] == "gguf" else str(self.python)
            command = [python, "-m", module, str(source), str(unfinished), str(self.weights)]
            status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        if status:
            raise NotAvailableError(f"the conversion failed: see {log}")
        unfinished.rename(path)


def drawn_config(shape: str) -> Path:
    """A file with the config of a model with random weights."""
    path = HOME / "models" / f"{shape}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(SHAPES[shape], indent=2))
    return path


_CONVERTERS = {
    "llama_cpp": "gguf",
    "ik_llama_cpp": "gguf",
    "onward": "gguf",
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
}

# The same GGUF file in both (benchmarks/gguf_models.py).
GGUF_RECIPES = ("Q4_K_M", "Q8_0", "Q4_0", "Q6_K")


def gguf_contenders(recipe: str) -> list[Contender]:
    return [
        Contender(OURS, recipe, "onward", None, recipe),
        Contender("llama.cpp", recipe, "llama_cpp", "llama.cpp", recipe),
        Contender("llama.cpp", recipe, "llama_cpp", "llama.cpp", recipe, "plain attention"),
    ]


CONTENDERS = [
    Contender(OURS, "bf16", "onward"),
    Contender("transformers", "bf16", "transformers", "transformers"),
    Contender("llama.cpp", "bf16", "llama_cpp", "llama.cpp", "BF16"),
    Contender("llama.cpp", "bf16", "llama_cpp", "llama.cpp", "BF16", "plain attention"),
    Contender("ik_llama.cpp", "bf16", "ik_llama_cpp", "ik_llama.cpp", "BF16"),
    Contender("openvino", "bf16", "openvino", "openvino", "fp16"),
    Contender(OURS, "int8", "onward"),
    Contender("llama.cpp", "int8", "llama_cpp", "llama.cpp", "Q8_0"),
    Contender("llama.cpp", "int8", "llama_cpp", "llama.cpp", "Q8_0", "plain attention"),
    Contender("ik_llama.cpp", "int8", "ik_llama_cpp", "ik_llama.cpp", "Q8_0"),
    Contender("openvino", "int8", "openvino", "openvino", "int8"),
    Contender("onnxruntime", "int8", "onnxruntime", "onnxruntime", "int8"),
    Contender(OURS, "int4", "onward"),
    Contender("llama.cpp", "int4", "llama_cpp", "llama.cpp", "Q4_0"),
    Contender("llama.cpp", "int4", "llama_cpp", "llama.cpp", "Q4_0", "plain attention"),
    Contender("ik_llama.cpp", "int4", "ik_llama_cpp", "ik_llama.cpp", "Q4_0"),
    Contender("openvino", "int4", "openvino", "openvino", "int4"),
    Contender("onnxruntime", "int4", "onnxruntime", "onnxruntime", "int4"),
]


def with_8_bit_caches(precision: str) -> list[Contender]:
    """The contenders that can store keys and values in 8 bits; llama.cpp needs flash attention for it."""
    chosen = [each for each in CONTENDERS if each.precision == precision and not each.variant]
    return [replace(each, variant="8-bit cache") for each in chosen if each.name in (OURS, "llama.cpp", "openvino")]


def contenders_of(shape: str) -> list[Contender]:
    """The contenders for a shape; except for the default shape, those whose files are made without a network."""
    if shape == DEFAULT_SHAPE:
        return CONTENDERS
    ours = [Contender(OURS, precision, "onward_drawn", shape=shape) for precision in PRECISIONS]
    peers = [replace(peer, shape=shape) for peer in CONTENDERS if peer.name in ("llama.cpp", "openvino")]
    return ours + peers
