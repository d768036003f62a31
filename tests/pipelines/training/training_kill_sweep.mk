# Outside CI: one training killed with -9 at thirty random moments and finished, compared with an undisturbed one.
.PHONY: training-kill-sweep

training-kill-sweep: environment
	$(BIN)/python tests/pipelines/training/training_kill_sweep.py --kills 30 --output docs/evidence/training-kill-sweep.json
