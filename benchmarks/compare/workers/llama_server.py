"""llama.cpp's own server, from the package xllamacpp, until stdin ends.

python llama_server.py FILE PORT THREADS SEQUENCES CONTEXT
"""

import sys

import xllamacpp


def main() -> None:
    file, port, threads, sequences, context = sys.argv[1], *map(int, sys.argv[2:])
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.n_parallel, settings.n_ctx = sequences, sequences * context
    settings.cache_prompt, settings.warmup, settings.port = False, True, port
    server = xllamacpp.Server(settings)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
