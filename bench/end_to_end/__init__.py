"""Steps of training of whole models of transformers, of one attention and another.

`python -m bench.end_to_end` (docs/benchmarking.md): `shapes` has the models, `documents` the
batches, `attentions` who computes attention, `tasks` the losses, `training` one run, `rows` what a
run says.
"""
