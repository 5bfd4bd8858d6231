"""Fills a cache with all kernels of the GPU tests, on any machine with a compiler.

``python tests/gpu/fill_cache.py --gpu H200 FOLDER``; on the GPU host, run the tests with TILEKERN_CACHE_DIR=FOLDER.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1]), str(HERE.parent / "kernels")]

from gpu_samples import cases, name_of, problem_of  # noqa: E402 (found through the path above)

from tilekern.runtime.dispatch import compile_default  # noqa: E402
from tilekern.spec.targets import resolve  # noqa: E402


def fill(case, gpu, folder):
    os.environ["TILEKERN_CACHE_DIR"] = folder
    spec, problem = problem_of(case, 1009)
    compile_default(spec, spec.bucketed(problem), resolve(gpu))
    return name_of(case)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("folder")
    chosen = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        for future in [pool.submit(fill, case, chosen.gpu, chosen.folder) for case in cases()]:
            sys.stdout.write(future.result() + "\n")


if __name__ == "__main__":
    main()
