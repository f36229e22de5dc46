"""Measures our scheduler against the stock one, in turn and in one command: `python -m bench`.

Modules: `workloads` (what is run), `zero_worker` (a worker that computes nothing), `probe` (what is measured inside the
scheduler), `watch` (what is measured from outside), `processes` (starting and stopping), `runs` (one measured run),
`figures` (names, medians, ratios, files), `__main__` (the commands).

Rules: both sides get the same probe, the same client and the same workers; every figure is read with its twin from the
other side; nothing here changes how either scheduler works.
"""
