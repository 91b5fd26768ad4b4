"""A driver script through the public API: start a run, look at it while it goes, wait for its end.

Usage: python jobs/driver_script.py configs/smollm2_chain_sum.yaml [section.key=value ...]
"""

import sys

from rayrl import Run, RunConfig


def main(path: str, overrides: list[str]) -> None:
    """Train as the config says and print the result."""
    config = RunConfig.load(path, overrides)
    print(f"{config.samples_per_step} samples per step, {config.driver.num_steps} steps, into {config.run_dir}")
    handle = Run(config).start()
    print(f"started: {handle.status()}")
    try:
        result = handle.wait()
    except KeyboardInterrupt:
        print("stopping after this step")
        handle.stop()
        result = handle.wait()
    print(f"{result.status} after {result.steps} steps: {result.run_dir}")
    for name, value in sorted(result.metrics.items()):
        print(f"{name} = {value:.4g}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
