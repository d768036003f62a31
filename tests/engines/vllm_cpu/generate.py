"""Greedy decoding by vLLM's offline engine, step by step: run by the engine's own Python, not by the project's.

Reads one JSON object from standard input: {"target", "speculative" (or null), "prompts" [[ids]], "max_tokens",
"max_model_len"}. Prints one JSON line: for each prompt the output ids, how many tokens each step gave, and the draft
tokens that each step verified (the first step, the prompt's own, has none).
"""

import json
import os
import sys
import time


def main() -> None:
    asked = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes with its log
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=asked["target"],
            dtype="float32",
            max_model_len=asked["max_model_len"],
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            skip_tokenizer_init=True,
            speculative_config=asked["speculative"],
            seed=0,
        )
    )
    requests = engine.engine_core.engine_core.scheduler.requests
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    answers = []
    for number, prompt in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        ids, steps, drafts, pending, began = [], [], [], [], time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = list(output.outputs[0].token_ids)
                if len(now) > len(ids):
                    steps.append(len(now) - len(ids))
                    drafts.append(pending)
                ids = now
            pending = [token for request in requests.values() for token in request.spec_token_ids]
        seconds = round(time.perf_counter() - began, 2)
        answers.append({"output_ids": ids, "steps": steps, "drafts": drafts, "seconds": seconds})
    print(json.dumps(answers), file=answer, flush=True)


if __name__ == "__main__":
    main()
