"""The commit-msg hook: `type(area): subject` in the imperative, lower case, short. Standard library only."""

import re
import sys
from pathlib import Path

TYPES = ("feat", "fix", "docs", "test", "refactor", "perf", "build", "ci", "chore", "revert")
MAX_SUBJECT = 72

_HEADER = re.compile(rf"^(?P<type>{'|'.join(TYPES)})(\((?P<area>[a-z0-9-]+)\))?!?: (?P<subject>.+)$")
_GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")


def faults(message: str) -> list[str]:
    """Return what is wrong with a commit message; nothing for a good one, and for those that git writes itself."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    header = lines[0] if lines else ""
    if header.startswith(_GENERATED):
        return []
    match = _HEADER.match(header)
    if match is None:
        return [f"{header!r} is not 'type(area): subject' with a type of {', '.join(TYPES)}"]
    found = []
    subject = match["subject"]
    if len(header) > MAX_SUBJECT:
        found.append(f"the first line has {len(header)} characters, at most {MAX_SUBJECT} are allowed")
    if subject[0].isupper() and not subject.split()[0].isupper():
        found.append(f"the subject {subject!r} starts with a capital letter")
    if subject.endswith("."):
        found.append(f"the subject {subject!r} ends with a full stop")
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line must be empty")
    return found


def main(arguments: list[str]) -> int:
    """Check the file that git passes to the hook; 1 and the faults on stderr if the message is refused."""
    found = faults(Path(arguments[0]).read_text(encoding="utf-8"))
    for fault in found:
        sys.stderr.write(f"commit message: {fault}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
