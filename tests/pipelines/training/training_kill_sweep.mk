# Outside CI: one training killed with -9 at thirty random moments and finished, compared with an undisturbed one; and a
# group of two nodes of which one is lost.
.PHONY: training-kill-sweep elastic-group

training-kill-sweep: environment
	$(BIN)/python tests/pipelines/training/training_kill_sweep.py --kills 30 --output docs/evidence/training-kill-sweep.json

elastic-group: environment
	$(BIN)/pytest -m evidence tests/cluster/test_elastic_group.py
