"""A fleet of replicas on a virtual clock: the engine's policy, the router and the budget of retries as they are.

python -m benchmarks.fleet --help

Only the model is replaced, by the time that a step takes (step.py), which is fitted from steps of the real engine
(measured.py). All that is said of more than one machine is simulated.
"""
