# Outside CI: one run killed with -9 at ten random moments and finished, compared with an undisturbed one; and builds of the
# cache stage whose driver and Ray workers are killed at 200 random moments in all.
.PHONY: kill-sweep cache-kill-sweep

kill-sweep: environment
	$(BIN)/python tests/pipelines/kill_sweep.py --moments 10 --output docs/evidence/kill-sweep.json

cache-kill-sweep: environment
	$(BIN)/python tests/pipelines/cache_kill_sweep.py --kills 200 --output docs/evidence/cache-stage-kills.json
