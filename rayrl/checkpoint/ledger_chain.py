"""The hash chain of the ledger: one link for each transaction, over its rows and the link before it.

    link_n = sha256(link_(n-1), rows of transaction n)

Whoever edits, removes or slips in a row must compute every later link again, and then those no longer match the links
that checkpoints carry. Rows are taken as they were inserted: `superseded_by`, which a rewind sets later, is not in a
link, as it follows from the rewinds; each of those is an event, too, and so in its link.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GENESIS = hashlib.sha256(b"rayrl ledger").hexdigest()
"""What the first link follows."""

CHAINED = ("events", "prompts", "publications", "steps")
"""Tables in the order in which the rows of one transaction are taken; within a table they come by id."""

Rows = Mapping[str, Sequence[Sequence[Any]]]
"""By table: the values of each row, without its id and `superseded_by`."""


def link_digest(previous: str, rows: Rows) -> str:
    """Return the link after `previous` over the rows of one transaction."""
    content = [[table, [list(row) for row in rows[table]]] for table in CHAINED if rows.get(table)]
    text = json.dumps([previous, content], separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def first_broken_link(links: Iterable[tuple[int, str]], rows_by_position: Mapping[int, Rows]) -> int | None:
    """Return the position of the first link that does not match the rows, or None.

    A link covers the rows after the link before it up to its own position. In a ledger that was begun without a chain
    the first link covers everything before it. Rows behind the last link break it at the first such position.
    """
    previous, done = GENESIS, 0
    positions = sorted(rows_by_position)
    index = 0
    for position, digest in links:
        merged: dict[str, list[Sequence[Any]]] = {}
        while index < len(positions) and positions[index] <= position:
            for table, rows in rows_by_position[positions[index]].items():
                merged.setdefault(table, []).extend(rows)
            index += 1
        if link_digest(previous, merged) != digest:
            return position
        previous, done = digest, position
    return positions[index] if index < len(positions) and positions[index] > done else None
