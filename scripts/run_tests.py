# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""``make test``: every test that needs no GPU, in two lanes side by side, since hardly a test keeps two cores busy.

    python scripts/run_tests.py [words for pytest]

One lane holds what starts Ray or verl's trainer, one process after another; the other what computes without either.
The second lane's words come when it has ended. With a path among the words, one pytest runs on that alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPUTING = ("algorithms", "bench", "diff", "export", "kernels", "numerics", "ops", "packaging", "recipes", "train")
TRAINS = "tests/recipes/test_recipe_end_to_end_on_cpu.py"
PYTEST = [sys.executable, "-m", "pytest", "--gpu=never", "--durations=15"]
NOTHING_CHOSEN = 5
"""pytest's exit status where the words chose no test."""


def lanes() -> tuple[list[str], list[str]]:
    """Paths and exclusions of the lane that trains and of the one that computes; together every test, once."""
    paths = [f"tests/{name}" for name in COMPUTING]
    recipes = [f"--ignore={path.relative_to(ROOT)}" for path in (ROOT / "tests/recipes").glob("test_*.py")]
    others = [f"--ignore={path}" for path in paths if path != "tests/recipes"]
    alone = f"--ignore={TRAINS}"
    return ["tests", *others, *(word for word in recipes if word != alone)], [*paths, alone]


def main(words: list[str]) -> int:
    if any((ROOT / word.partition("::")[0]).exists() for word in words if not word.startswith("-")):
        return subprocess.run([*PYTEST, *words], cwd=ROOT).returncode
    training, computing = ([*PYTEST, *words, *lane] for lane in lanes())
    with tempfile.TemporaryFile() as said:
        # Ray starts its workers at nice 15. The lane that waits for them is the longer one and must not starve.
        second = subprocess.Popen(["nice", "-n", "15", *computing], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run(training, cwd=ROOT).returncode
            second.wait()
        finally:
            second.kill()
        said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
    statuses = {first, second.returncode}
    # A lane that a signal ended has a negative status.
    return min(statuses) if statuses <= {0, NOTHING_CHOSEN} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
