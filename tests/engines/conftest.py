"""Engine tests build and run other people's servers: they are collected only by `make test-engines`."""

import os

ENGINES = ["test_llama_cpp.py", "test_llama_cpp_layouts.py", "test_vllm.py"]
collect_ignore = [] if os.environ.get("DSPARK_ENGINES") else ENGINES
