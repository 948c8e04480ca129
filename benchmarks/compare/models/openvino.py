"""A checkpoint as OpenVINO's IR, through optimum-intel.

python -m benchmarks.compare.models.openvino CHECKPOINT DESTINATION fp16|int8|int4

int4 is symmetric in groups of 128, with 8 bits for the embedding and the head. Other settings were not compared.
"""

import subprocess
import sys
from pathlib import Path

INT4 = ["--sym", "--group-size", "128", "--ratio", "1.0"]


def main() -> None:
    checkpoint, destination, weight_format = sys.argv[1:]
    exporter = str(Path(sys.executable).parent / "optimum-cli")
    command = [exporter, "export", "openvino", "--model", checkpoint, "--task", "text-generation-with-past"]
    command += ["--weight-format", weight_format, *(INT4 if weight_format == "int4" else []), destination]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
