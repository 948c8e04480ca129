"""A checkpoint as ONNX for onnxruntime-genai, through its own builder.

python -m benchmarks.compare.models.onnxruntime CHECKPOINT DESTINATION int8|int4

Activations in 8 bits (accuracy_level 4), groups of 32, the embedding shared with the head, and the head run for the
last token only. Other settings were not compared.
"""

import subprocess
import sys
import tempfile

OPTIONS = ["accuracy_level=4", "block_size=32", "shared_embeddings=true", "prune_lm_head=true", "hf_token=false"]


def main() -> None:
    checkpoint, destination, precision = sys.argv[1:]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--execution_provider", "cpu"]
    with tempfile.TemporaryDirectory() as cache:
        files = ["--input", checkpoint, "--output", destination, "--precision", precision, "--cache_dir", cache]
        subprocess.run([*builder, *files, "--extra_options", *OPTIONS], check=True)


if __name__ == "__main__":
    main()
