"""Settings of the whole suite: nothing drawn by chance, nothing that depends on the number of cores."""

import os

import hypothesis
import torch

# Tests are of tiny models, on which a second thread is only overhead.
torch.set_num_threads(1)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None, database=None, max_examples=100)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
