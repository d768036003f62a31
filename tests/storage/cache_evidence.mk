# Outside CI: what the target cache has to withstand, at length; each program stores what it saw.
.PHONY: cache-evidence

CACHE_EVIDENCE := kills damage full_disk s3_faults worlds

cache-evidence: environment
	for name in $(CACHE_EVIDENCE); do \
	  PYTHONPATH=tests/storage OMP_NUM_THREADS=1 $(BIN)/python tests/storage/evidence/$$name.py \
	    --output docs/evidence/cache-$$(echo $$name | tr _ -).json || exit 1; \
	done
