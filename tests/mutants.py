"""Faults on purpose: each breaks one promise in a copy of the library, and the tests of `make test` must notice.

python tests/mutants.py            # all of them, a table; exit 1 if one survives
python tests/mutants.py rounding   # those whose promise contains a word
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "src" / "oktopk"
TIMEOUT_SECONDS = 600  # a mutant that hangs is noticed too: by pytest's own timeout, long before this


@dataclass(frozen=True)
class Mutant:
    """One promise, the line that keeps it, the line that breaks it, and who is to notice."""

    promise: str
    path: str  # below src/oktopk
    old: str  # stands there exactly once
    new: str
    tests: str  # files below tests/, of which those that are not slow are run

    def source(self) -> str:
        """The file with the fault in it."""
        text = (LIBRARY / self.path).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path} holds {self.old!r} {text.count(self.old)} times, expected once: adapt the mutant."
            )
        return text.replace(self.old, self.new)

    def is_killed(self) -> bool:
        """Whether a test fails; pytest's exit code 1 says just that, any other number is an error of the run."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "oktopk")
            shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__"))
            (copy / self.path).write_text(self.source(), encoding="utf-8")
            code = _run_tests(self.tests.split(), folder)
        if code not in (0, 1):
            raise RuntimeError(f"pytest ended with {code} for {self.promise!r}: the run itself is broken.")
        return code == 1


MUTANTS = [
    Mutant(
        "a mean over senders is over those who sent something",
        "primitives/collectives.py",
        "vector.values.ne(0)",
        "vector.values.eq(vector.values)",
        "test_local_steps_senders.py",
    ),
    Mutant(
        "what was not sent stays owed",
        "reduction/feedback.py",
        "self._energy[layout] += self._kernels.retain_(residual, sent)",
        "self._energy[layout] += self._kernels.retain_(residual, sent); residual[-1:] = 0.0",
        "test_contract.py",
    ),
    Mutant(
        "each block comes from the rank that owns its region",
        "primitives/collectives.py",
        "    return Gathered(join(blocks, bounds), lost,",
        "    blocks[:2] = blocks[:2][::-1] if len(blocks) > 2 else blocks[:2]\n"
        "    return Gathered(join(blocks, bounds), lost,",
        "test_contract.py",
    ),
    Mutant(
        "all ranks add up in the same order, and get the same bits",
        "primitives/collectives.py",
        "total = tools.kernels.sum_sparse(vectors)\n",
        "total = tools.kernels.sum_sparse(vectors[tools.rank :] + vectors[: tools.rank])\n",
        "test_contract.py",
    ),
    Mutant(
        "a sender keeps its rounding",
        "primitives/collectives.py",
        "sent = torch.cat([part.values if p is None else p.values for part, p in zip(parts, packed, strict=True)])",
        "sent = torch.cat([part.values for part, p in zip(parts, packed, strict=True)])",
        "test_contract.py",
    ),
    Mutant(
        "the owner of a region keeps the rounding of what it sends on",
        "primitives/collectives.py",
        "block.values - packed.values, bounds[-1])",
        "block.values - block.values, bounds[-1])",
        "test_contract.py",
    ),
    Mutant(
        "an inner node of gtopk owes what it drops",
        "algorithms/gtopk.py",
        "                owed.append(dropped)\n",
        "",
        "test_contract.py",
    ),
    Mutant(
        "ranks that mean different things are told so before data moves",
        "reduction/agreement.py",
        "        if differing:\n",
        "        if len(differing) > len(everyone):\n",
        "test_bad_input.py test_reducer.py",
    ),
    Mutant(
        "a gradient that is not finite is everyone's, and leaves residuals alone",
        "reduction/pipeline.py",
        "self.feedback.is_finite(plan.gradient, plan.wanted)\n",
        "(self.feedback.is_finite(plan.gradient, plan.wanted) or True)\n",
        "test_contract.py",
    ),
    Mutant(
        "no more travels than the cost model says",
        "primitives/selection.py",
        "return Winners(kernels.above(region, threshold), threshold, exponent, counts)",
        "return Winners(region, threshold, exponent, None)",
        "test_contract.py test_oktopk.py",
    ),
    Mutant(
        "at another world size what is owed reaches the weights once",
        "reduction/rank_states.py",
        "return self.world_size / self.world_size_before",
        "return 1.0",
        "test_checkpoint.py",
    ),
    Mutant(
        "a resumed run groups as the saved one did, and goes on bit for bit",
        "reduction/pipeline.py",
        'self.grouping.resume(state["groups"])',
        "self.grouping.resume([])",
        "test_checkpoint.py",
    ),
    Mutant(
        "a damaged checkpoint is refused",
        "checkpoint.py",
        "if len(data) != file.bytes or sha256(data).hexdigest() != file.sha256:",
        "if len(data) != file.bytes:",
        "test_checkpoint.py",
    ),
    Mutant(
        "a directory always holds a whole checkpoint",
        "checkpoint.py",
        "    listed = {file.name for file in manifest.files}\n",
        "    listed = set()\n",
        "test_checkpoint.py",
    ),
    Mutant(
        "no answer in time is no death",
        "transport/addresses.py",
        "self._answers = dict.fromkeys(addresses, Answer.UNKNOWN)",
        "self._answers = dict.fromkeys(addresses, Answer.DEAD)",
        "test_faults_witness.py",
    ),
    Mutant(
        "a failure on one rank is told to the others",
        "reduction/communication.py",
        "step, phase))\n            return error\n",
        "step, phase)) if step < 0 else None\n            return error\n",
        "test_faults.py test_reduction_faults.py",
    ),
    Mutant(
        "own weights contain what is owed",
        "reduction/updates.py",
        "self.kernels.move_(self._difference(own, weights), arrived.mean, arrived.sent)",
        "self.kernels.move_(self._difference(own, weights), arrived.mean, arrived.mean)",
        "test_local_steps.py",
    ),
]


def _run_tests(names: list[str], library: str) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--timeout",
        "120",
    ]
    environment = os.environ | {"PYTHONPATH": library}
    return subprocess.run(
        [*command, *(f"tests/{name}" for name in names)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        check=False,
    ).returncode


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.promise for word in words)]
    survivors = 0
    for mutant in chosen:
        killed = mutant.is_killed()
        survivors += not killed
        print(f"{'killed' if killed else 'SURVIVED'}  {mutant.promise} ({mutant.path})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
