"""What is told of an actor that died."""

import pytest
from ray.exceptions import RayActorError

from rayrl.errors import ActorDied
from rayrl.infra.failures import explain_failure

HEAD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n\tactor_id: 0a32\n\tpid: 7\n"
    "\tnamespace: 2102\n\tip: 192.0.2.2\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{HEAD}The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`."),
        (
            f"{HEAD}The actor is dead because its worker process has died. Worker exit detail: End of file. Some "
            "common causes include: (1) the OOM killer, (2) others.",
            "its worker process has died. Worker exit detail: End of file. It was killed, by the kernel for want of "
            "memory for example, or it crashed.",
        ),
        (
            "The actor died in its creation task:\n  File a.py\n    raise it",
            "creation task:\n  File a.py\n    raise it",
        ),
        (HEAD.rstrip(), "The actor died unexpectedly before finishing this task."),
    ],
)
def test_death_is_told_by_its_cause_without_names_that_the_label_has(text: str, told: str) -> None:
    error = explain_failure(RayActorError(error_msg=text), phase="step 3", actor="train-0")

    assert isinstance(error, ActorDied)
    first, *_ = str(error).split("\nits stderr")
    assert first.startswith("step 3: train-0 died: ")
    assert first.endswith(told)
    assert "class_name" not in first
