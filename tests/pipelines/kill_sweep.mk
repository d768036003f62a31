# Outside CI: one run killed with -9 at ten random moments and finished, compared with an undisturbed one.
.PHONY: kill-sweep

kill-sweep: environment
	$(BIN)/python tests/pipelines/kill_sweep.py --moments 10 --output docs/evidence/kill-sweep.json
