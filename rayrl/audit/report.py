"""The audit of a run: all checks, and the numbers beside them."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayrl.audit.ages import check_ages
from rayrl.audit.finding import Finding, Verdict, judge
from rayrl.audit.identity import LEDGER, Identity, read_identity
from rayrl.audit.integrity import CLAIM, check_integrity, unusable
from rayrl.audit.prompts import check_outcomes, check_prompts
from rayrl.audit.publications import check_publications, publication_rounds
from rayrl.audit.run_record import RunRecord, read_run
from rayrl.audit.step_view import step_views
from rayrl.audit.steps import check_denominators, check_steps
from rayrl.audit.traces import has_ledger, traces_of_steps
from rayrl.checkpoint.damaged import read_set_aside
from rayrl.errors import CheckpointError
from rayrl.utils.atomic_file import write_atomically

AUDIT_FILE = "audit.json"
CHECKS = (
    check_integrity,
    check_steps,
    check_prompts,
    check_outcomes,
    check_ages,
    check_denominators,
    check_publications,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the records of a run prove, and their numbers."""

    run_id: str
    findings: tuple[Finding, ...]
    numbers: Mapping[str, Any]
    """JSON-able: counts of outcomes, ages, versions per trajectory, publications and digests."""

    @property
    def passed(self) -> bool:
        """Whether every check is proven."""
        return all(finding.verdict == "proven" for finding in self.findings)

    def to_json(self) -> str:
        """Return the content of `audit.json`."""
        body = {
            "run_id": self.run_id,
            "passed": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
            "numbers": self.numbers,
        }
        return json.dumps(body, indent=1) + "\n"


def audit_run(run_dir: Path) -> AuditReport:
    """Audit the folder of a run; nothing is written.

    A record that cannot be read is a finding, not an error. Raises RunFolderError or ConfigError if the folder is not
    one that can be audited.
    """
    identity = read_identity(run_dir)
    if not has_ledger(run_dir):
        return AuditReport(run_id=identity.run_id, findings=(_without_ledger(run_dir, identity),), numbers={})
    if identity.config is None:
        finding = judge("integrity", CLAIM, unusable(identity.faults))
        return AuditReport(run_id=identity.run_id, findings=(finding,), numbers={})
    try:
        run = read_run(run_dir, identity, identity.config)
    except CheckpointError as error:
        finding = judge("integrity", CLAIM, [*unusable(identity.faults), str(error)])
        return AuditReport(run_id=identity.run_id, findings=(finding,), numbers={})
    return AuditReport(
        run_id=identity.run_id, findings=tuple(check(run) for check in CHECKS), numbers=audit_numbers(run)
    )


def _without_ledger(run_dir: Path, identity: Identity) -> Finding:
    """A run that has come to no step has no ledger; from any other one it was taken."""
    violations = unusable(identity.faults)
    traces = traces_of_steps(run_dir)
    if traces:
        violations.append(f"there is no ledger at {run_dir / LEDGER}, though the run has left {', '.join(traces)}")
    has_failed = (run_dir / "logs" / "failure.txt").is_file()
    why = "the run failed while it started, see logs/failure.txt" if has_failed else "the run did not get that far"
    return judge("integrity", CLAIM, violations, f"any record: no step was made and nothing was recorded; {why}")


def write_audit(run_dir: Path) -> AuditReport:
    """Audit a run and leave the report in its folder. Raises also OSError."""
    report = audit_run(run_dir)
    write_atomically(run_dir / AUDIT_FILE, report.to_json().encode())
    return report


def audit_numbers(run: RunRecord) -> dict[str, Any]:
    """Return the numbers of a run that its checks look at."""
    ages: Counter[int] = Counter()
    spread: Counter[int] = Counter()
    views = step_views(run)
    for view in views:
        if view.rollouts is None:
            continue
        ages.update(view.started_from - oldest for oldest in view.rollouts.oldest)
        spread.update(view.rollouts.versions_per_trajectory)
    outcomes = Counter(row.outcome for row in run.ledger.live_prompts)
    return {
        "steps": len(views),
        "version": views[-1].row.version if views else 0,
        "outcomes": {kind: outcomes.get(kind, 0) for kind in ("trained", "filtered", "given_up")},
        "reasons": dict(Counter(row.reason for row in run.ledger.live_prompts if row.reason)),
        "superseded_outcomes": len(run.ledger.prompts) - len(run.ledger.live_prompts),
        "rewinds": len(run.ledger.rewinds),
        "events": dict(Counter(event.kind for event in run.ledger.events)),
        "trajectory_ages": {str(age): ages[age] for age in sorted(ages)},
        "versions_per_trajectory": {str(count): spread[count] for count in sorted(spread)},
        "loss_tokens": sum(view.row.detail.get("loss_tokens", 0) for view in views),
        "stale_tokens": sum(view.row.detail.get("stale_tokens", 0) for view in views),
        "publications": [
            {
                "version": item.version,
                "digests": list(item.digests),
                "acknowledged": list(item.acknowledged),
                "silent": list(item.silent),
            }
            for item in publication_rounds(run.ledger)
            if item.is_live
        ],
        "checkpoints_set_aside": read_set_aside(run.path / "checkpoints"),
    }


_WORDS: Mapping[Verdict, str] = {"proven": "proven", "refuted": "REFUTED", "unproven": "unproven"}


def report_lines(report: AuditReport, max_violations: int = 10) -> list[str]:
    """Return the report as text: one line for each check, the first violations, then the numbers."""
    width = max(len(finding.check) for finding in report.findings)
    lines = []
    for finding in report.findings:
        lines.append(f"{_WORDS[finding.verdict]:<8}  {finding.check:<{width}}  {finding.claim}")
        if finding.missing and finding.verdict == "unproven":
            lines.append(f"            missing: {finding.missing}")
        lines += [f"            {text}" for text in finding.violations[:max_violations]]
        more = len(finding.violations) - max_violations
        if more > 0:
            lines.append(f"            and {more} more")
    if report.numbers:
        lines += ["", *_number_lines(report.numbers)]
    return lines


def _number_lines(numbers: Mapping[str, Any]) -> list[str]:
    rows = [
        ("steps", f"{numbers['steps']}, version {numbers['version']}"),
        ("prompts", _pairs(numbers["outcomes"])),
        ("superseded", f"{numbers['superseded_outcomes']} outcomes by {numbers['rewinds']} rewinds"),
        ("events", _pairs(numbers["events"])),
        ("ages of trajectories", _pairs(numbers["trajectory_ages"])),
        ("versions per trajectory", _pairs(numbers["versions_per_trajectory"])),
        ("loss tokens", f"{numbers['loss_tokens']}, and {numbers['stale_tokens']} masked as too old"),
    ]
    publications = numbers["publications"]
    rows.append(("publications", str(len(publications))))
    rows += [
        (
            f"  version {item['version']}",
            f"digest {', '.join(digest[:16] for digest in item['digests'])} from {', '.join(item['acknowledged'])}"
            + (f"; silent: {', '.join(item['silent'])}" if item["silent"] else ""),
        )
        for item in publications[-5:]
    ]
    rows += [(f"set aside: {name}", reason) for name, reason in numbers.get("checkpoints_set_aside", {}).items()]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"
