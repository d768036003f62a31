# Outside CI: losslessness with 200,000 sequences a case (about twenty minutes on one core).
.PHONY: losslessness scheduler-evidence

losslessness: environment
	OMP_NUM_THREADS=1 $(BIN)/python tests/dspark/lossless_evidence.py --output docs/evidence/losslessness.json

scheduler-evidence: environment
	OMP_NUM_THREADS=1 $(BIN)/python tests/dspark/scheduler_evidence.py --output docs/evidence/scheduler.json

# Random weights against the target's own, for each kind of drafter; needs the quickstart's cache (`dspark cache`).
.PHONY: starting-weights

starting-weights: environment
	$(BIN)/python benchmarks/starting_weights.py configs/quickstart.yaml --output docs/evidence/starting-weights.json
