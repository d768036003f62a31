# Slow, outside CI: what was published, run by a real serving engine. See docs/engines.md.
#   make test-engines                       the quickstart's run, and small drafters of every kind
#   make test-engines DSPARK_RUN=runs/mine  another run directory
# The engines are fetched and built or installed once, under .engines/; delete that folder to build again.
.PHONY: test-engines

test-engines: environment
	DSPARK_ENGINES=1 $(BIN)/pytest tests/engines --timeout 7200 -s
