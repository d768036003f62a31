# Outside CI, because they take minutes to hours: each program stores what it saw under docs/evidence. They share the
# small models and writers of the tests.
HELPERS  := tests/dspark:tests/pipelines:tests/pipelines/training:tests/storage
EVIDENCE := PYTHONPATH=$(HELPERS) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evidence
STORED   := --output docs/evidence

.PHONY: losslessness scheduler-evidence starting-weights training-recipes kill-sweep cache-kill-sweep cache-evidence
.PHONY: compare-algorithms training-kill-sweep elastic-group codec-evidence codec-speeds test-engines

# 200,000 sequences a case: about twenty minutes on one core.
losslessness: environment
	$(EVIDENCE)/losslessness.py $(STORED)/losslessness.json

scheduler-evidence: environment
	$(EVIDENCE)/scheduler.py $(STORED)/scheduler.json

# Random weights against the target's own, for each kind of drafter; needs the quickstart's cache (`dspark cache`).
starting-weights: environment
	$(BIN)/python benchmarks/starting_weights.py configs/quickstart.yaml $(STORED)/starting-weights.json

# One setting of the training changed at a time; needs the quickstart's cache. About seven minutes of one quiet core for a
# recipe and seed.
training-recipes: environment
	$(BIN)/python benchmarks/recipes.py configs/quickstart.yaml $(STORED)/recipes.json

# DSpark (Markov, RNN), DFlash and EAGLE-3 at equal steps from the quickstart's cache, two seeds: eight trainings.
compare-algorithms: environment
	$(BIN)/dspark cache configs/quickstart.yaml
	$(BIN)/python benchmarks/evidence/algorithms.py configs/quickstart.yaml --work runs/algorithms \
		--results docs/results.md $(STORED)/algorithms.json

# One run killed with -9 at ten random moments and finished, compared with an undisturbed one.
kill-sweep: environment
	$(EVIDENCE)/run_kills.py --moments 10 $(STORED)/kill-sweep.json

# Builds of the cache stage whose driver and Ray workers are killed at 200 random moments in all.
cache-kill-sweep: environment
	$(EVIDENCE)/cache_stage_kills.py --kills 200 $(STORED)/cache-stage-kills.json

# What the target cache has to withstand, at length.
cache-evidence: environment
	for name in kills damage full_disk s3_faults worlds; do \
	  $(EVIDENCE)/cache/$$name.py $(STORED)/cache-$$(echo $$name | tr _ -).json || exit 1; \
	done

# One training killed with -9 at thirty random moments and finished, compared with an undisturbed one.
training-kill-sweep: environment
	$(EVIDENCE)/training_kills.py --kills 30 $(STORED)/training-kill-sweep.json

# A training group of two nodes of which one is lost.
elastic-group: environment
	$(BIN)/pytest -m evidence tests/cluster/test_elastic_group.py

# The target cache's codecs on real states: what drafters trained from coded states reach (about an hour of one core),
# and sizes, errors and speeds (minutes).
CODEC_RUN := benchmarks/codec_training.yaml

codec-evidence: environment
	$(BIN)/dspark regenerate $(CODEC_RUN)
	$(BIN)/dspark cache $(CODEC_RUN)
	$(BIN)/python benchmarks/codec_training.py $(CODEC_RUN) --work runs/codec-evidence/codecs \
		$(STORED)/codec-training.json

codec-speeds: codec-evidence
	$(BIN)/python benchmarks/cache.py $(CODEC_RUN) --pilot runs/codec-evidence/codecs/pilot $(STORED)/cache.json

# What was published, run by real serving engines (docs/engines.md), which are fetched and built once under .engines/:
#   make test-engines                       the quickstart's run, and small drafters of every kind
#   make test-engines DSPARK_RUN=runs/mine  another run directory
test-engines: environment
	DSPARK_ENGINES=1 $(BIN)/pytest tests/engines --timeout 7200 -s
