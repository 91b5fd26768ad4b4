"""Submit a `rayrl` command to a running Ray cluster, stream its log, and leave with its exit code.

    python jobs/submit.py train configs/smollm2_chain_sum.yaml driver.num_steps=5
    python jobs/submit.py --address <dashboard address> --working-dir . train configs/smollm2_chain_sum.yaml

Without `--working-dir` nothing is uploaded: the job runs in the current folder, with this Python, which the head node
must see under the same path (the same machine, or a shared file system). With it the folder is uploaded and `rayrl`
must be installed on the cluster; give absolute paths for models and `run.output_root` then.

Submitted by hand, the same is `ray job submit -- rayrl train configs/smollm2_chain_sum.yaml`.
"""

import argparse
import asyncio
import os
import shlex
import sys
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

EXCLUDES = [".git", ".venv", "/models", "/runs", "/wandb"]
TOKEN_HELP = (
    "the cluster asks for a token: run `ray get-auth-token --generate` once before `ray start`, set "
    "RAY_AUTH_MODE=token for both, and where the cluster is another machine RAY_AUTH_TOKEN to its token"
)


def entrypoint(command: list[str], uploads: bool) -> str:
    """Return the shell line of the job."""
    if uploads:
        return shlex.join(["python", "-m", "rayrl.cli.main", *command])
    # The workers of the cluster start in a folder of their own, so the paths of the config need this one.
    python = shlex.join([sys.executable, "-m", "rayrl.cli.main", *command])
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {python}"


async def stream(client: JobSubmissionClient, job: str) -> None:
    """Print the log of a job until it ends."""
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


def connect(address: str | None) -> JobSubmissionClient:
    """Return a client of the cluster; leaves with 1 and one line of explanation if it cannot be reached."""
    if address is not None:
        # Ray lets these win over an explicit address.
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            os.environ.pop(name, None)
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        sys.exit(f"submit: {TOKEN_HELP}\n  {error.message.splitlines()[0]}")
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"submit: no cluster at {address or os.environ.get('RAY_ADDRESS', 'this machine')}: {error}")


def main() -> int:
    """Submit, stream, and return the exit code of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="dashboard address; RAY_ADDRESS or a cluster of this machine if empty")
    parser.add_argument("--working-dir", help="folder to upload; nothing is uploaded if empty")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of rayrl, for example: train CONFIG")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("say what to run, for example: train configs/smollm2_chain_sum.yaml")
    client = connect(arguments.address)
    environment = {"working_dir": arguments.working_dir, "excludes": EXCLUDES} if arguments.working_dir else {}
    job = client.submit_job(
        entrypoint=entrypoint(arguments.command, bool(arguments.working_dir)), runtime_env=environment
    )
    print(f"submit: job {job}", flush=True)
    try:
        asyncio.run(stream(client, job))
    except KeyboardInterrupt:
        print(f"\nsubmit: the job goes on; `ray job logs -f {job}` follows it, `ray job stop {job}` stops it")
        return 130
    info = client.get_job_info(job)
    print(f"submit: job {job} {info.status}", flush=True)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"submit: {(info.message or 'no message').splitlines()[0]}", file=sys.stderr)
    return info.driver_exit_code or 1


if __name__ == "__main__":
    sys.exit(main())
