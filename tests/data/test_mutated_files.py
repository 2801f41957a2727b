"""Files made wrong in thousands of ways: each is read as valid data or refused with a
`QualmsError`, and no more.

No other exception, no warning, no crash, no code run, at most `SECONDS` of the processor and,
whatever its headers say, no more memory than the reader's bound. QUALMS_FUZZ=1 tries the full
number, in as many processes as there are cores, and prints what came of them;
QUALMS_MUTATION=reader:seed tries one.
"""

import os

import pytest

from tests.helpers.mutating import READERS, run

ONE = os.environ.get("QUALMS_MUTATION", "").rpartition(":")
FULL = os.environ.get("QUALMS_FUZZ") == "1"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600 if FULL else 900)
@pytest.mark.parametrize("name", [ONE[0]] if ONE[0] else READERS)
def test_a_file_made_wrong_is_read_or_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = READERS[name]
    count = reader.many if FULL else reader.few
    seeds = range(int(ONE[2]), int(ONE[2]) + 1) if ONE[0] else range(count)
    found = run(name, seeds, (os.cpu_count() or 1) if FULL else 1)
    told = "\n".join(
        f"QUALMS_MUTATION='{name}:{seed}': {reason}"
        for seed, reason in sorted(found.failures.items())
    )
    if FULL:
        with capsys.disabled():  # hours before the other kinds are done
            print(
                f"\n{name}: {len(seeds)} mutations, {found.accepted} accepted, {found.refused} refused, "
                f"{len(found.failures)} failed, {found.seconds:.0f} s\n{told}",
                flush=True,
            )
    assert not found.failures, told
    assert found.accepted + found.refused == len(seeds)
