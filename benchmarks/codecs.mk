# The target cache's codecs on real states: sizes, errors, speeds (minutes), and what drafters trained from coded states
# reach (about an hour of one core). Neither belongs to `make test`; both store what they find under docs/evidence.
CODEC_RUN := benchmarks/codec_training.yaml

.PHONY: codec-evidence codec-speeds

codec-evidence: environment
	$(BIN)/dspark regenerate $(CODEC_RUN)
	$(BIN)/dspark cache $(CODEC_RUN)
	$(BIN)/python benchmarks/codec_training.py $(CODEC_RUN) --work runs/codec-evidence/codecs \
		--output docs/evidence/codec-training.json

codec-speeds: codec-evidence
	$(BIN)/python benchmarks/cache.py $(CODEC_RUN) --pilot runs/codec-evidence/codecs/pilot \
		--output docs/evidence/cache.json
