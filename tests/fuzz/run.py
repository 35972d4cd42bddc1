"""Attack the package with bad input until the time is up, and count.

Every try is damaged input, or a disturbance, from a seed of its own. It must be refused with a sentence (HeadMapsError)
or give what it gives undisturbed; anything else is printed with the words that repeat it, and the exit code is 1. ::

    python tests/fuzz/run.py --seconds 300 --seed 0
    python tests/fuzz/run.py --only "result files" --first 17 --tries 1
"""

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

# After the lines above, which they depend on.
from tries import TRIES  # noqa: E402
from workshop import Workshop, check_sentence  # noqa: E402

from tl_headmaps import HeadMapsError  # noqa: E402

MOST_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="when to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TRIES, action="append", help="only this kind; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="number of the first try of each kind")
    parser.add_argument("--tries", type=int, help="so many of each kind, whatever the time")
    options = parser.parse_args()
    kinds = options.only or list(TRIES)
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    spent = dict.fromkeys(kinds, 0.0)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        try:
            while any(options.tries is None or tried[kind] < options.tries for kind in kinds):
                if options.tries is None and time.monotonic() - started > options.seconds:
                    break
                # The kind that had the least time: all kinds get the same share of it.
                kind = min(kinds, key=lambda kind: spent[kind])
                number = options.first + tried[kind]
                begun = time.monotonic()
                tried[kind] += 1
                try:
                    try:
                        held = TRIES[kind](shop, random.Random(f"{options.seed} {kind} {number}"))
                        refused[kind] += not held
                    except HeadMapsError as error:
                        refused[kind] += 1
                        check_sentence(error)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        break
                    failed[kind] += 1
                    if failed[kind] <= MOST_SHOWN:
                        print(f"\n{kind}, seed {options.seed}, try {number}:", file=sys.stderr)
                        traceback.print_exc(limit=-6)
                if options.tries is not None and tried[kind] >= options.tries:
                    spent[kind] = float("inf")
                elif tried[kind] > 1:  # the first one also makes what all others share
                    spent[kind] += time.monotonic() - begun
        finally:
            shop.close()
    print(f"{'kind':<20}{'tries':>8}{'refused':>9}{'failed':>8}")
    for kind in kinds:
        print(f"{kind:<20}{tried[kind]:>8}{refused[kind]:>9}{failed[kind]:>8}")
    total = f"{sum(tried.values())} tries in {time.monotonic() - started:.0f} s, {sum(failed.values())} failed"
    print(f"{total}; seed {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
