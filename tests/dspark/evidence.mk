# Outside CI: losslessness with 200,000 sequences a case (about twenty minutes on one core).
.PHONY: losslessness scheduler-evidence

losslessness: environment
	OMP_NUM_THREADS=1 $(BIN)/python tests/dspark/lossless_evidence.py --output docs/evidence/losslessness.json

scheduler-evidence: environment
	OMP_NUM_THREADS=1 $(BIN)/python tests/dspark/scheduler_evidence.py --output docs/evidence/scheduler.json
