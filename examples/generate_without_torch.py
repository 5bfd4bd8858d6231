"""Generate text in a process that imports neither torch nor transformers, and print it as it comes.

    python examples/generate_without_torch.py
    python examples/generate_without_torch.py --model models/qwen3-8b --weight-dtype int8 --temperature 0.7 --samples 4

Needs `pip install 'tilekern[text]'`, the driver of an NVIDIA GPU, and huggingface_hub to download what --model names.
docs/inference.md lists the models that it runs. `python -m tilekern.generate` is a command line with more options.
"""

import argparse
import sys
import time

from tilekern.inference import Sampling, load
from tilekern.inference.checkpoints import folder_of
from tilekern.inference.text import Tokenizer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="folder with safetensors, or a hub id")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--new", type=int, default=64, help="the most tokens of a text")
    parser.add_argument("--samples", type=int, default=1, help="texts; the first is printed as it comes")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--weight-dtype", help="int8 halves the bytes of most weights")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    tokenizer = Tokenizer(folder_of(args.model))
    ids = tokenizer.encode(args.prompt)
    engine = load(args.model, dtype=args.dtype, weight_dtype=args.weight_dtype, context=len(ids) + args.new)
    # Each text has a seed of its own, which alone decides its draws.
    ways = [Sampling(temperature=args.temperature, top_p=0.9, seed=seed) for seed in range(args.samples)]
    streams = [tokenizer.stream() for _ in ways]
    texts = [""] * args.samples
    tokens, started = 0, time.perf_counter()
    print(args.prompt, end="")
    for chosen in engine.generate([ids] * args.samples, args.new, ways):
        for number, token in enumerate(chosen):
            if token is not None:  # None: this text has ended
                part = streams[number].add(token)
                texts[number] += part
                tokens += 1
                if number == 0:
                    print(part, end="", flush=True)
    print(streams[0].rest())
    for number in range(1, args.samples):
        print(f"--- {number + 1}\n{args.prompt}{texts[number]}{streams[number].rest()}")
    seconds = time.perf_counter() - started
    print(f"{tokens} tokens in {seconds:.2f} s; torch is imported: {'torch' in sys.modules}", file=sys.stderr)


if __name__ == "__main__":
    main()
