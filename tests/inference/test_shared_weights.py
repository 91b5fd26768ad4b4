"""Weights through shared memory, and versions cut into chunks: what the vLLM engine is made of, without vLLM."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrl.errors import EngineError, TransferError
from rayrl.inference.child_output import ChildOutput
from rayrl.inference.shared_weights import SharedMemoryWriter, SharedWeights, open_weights
from rayrl.inference.version_chunks import ChunkBuilder
from rayrl.inference.vllm_api import supported, supported_range
from rayrl.infra.bucket_stream import tensors_of_stream
from rayrl.infra.buckets import stream_offsets
from rayrl.infra.weight_manifest import WeightManifest, spec_of


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "scalar": torch.tensor(2, dtype=torch.int64),
    }


@pytest.fixture
def writer():
    writer = SharedMemoryWriter()
    yield writer
    writer.close()


def test_tensors_come_back_bit_for_bit_when_they_are_opened(writer):
    for version in range(2):
        given_tensors = tensors(version)

        opened = open_weights(SharedWeights(**writer.write(version, given_tensors).to_dict()))

        assert list(opened) == list(given_tensors)
        for name, tensor in given_tensors.items():
            assert opened[name].dtype == tensor.dtype and torch.equal(opened[name], tensor)


def test_version_that_was_staged_in_the_memory_itself_is_written_without_a_copy(writer):
    given_tensors = tensors()
    manifest = WeightManifest(
        version=1, tensors=tuple(spec_of(name, item) for name, item in given_tensors.items()), bucket_bytes=64
    )
    offsets, num_bytes = stream_offsets(manifest.tensors)
    memory = writer.reserve(num_bytes)
    memory.fill_(7)
    staged = tensors_of_stream(manifest, memory[:num_bytes])
    for name, tensor in given_tensors.items():
        staged[name].copy_(tensor)
    held = [tensor.data_ptr() for tensor in staged.values() if tensor.numel()]

    opened = open_weights(writer.write(1, staged))

    assert all(torch.equal(opened[name], tensor) for name, tensor in given_tensors.items())
    start = writer.reserve(0).data_ptr()
    assert [pointer - start in offsets for pointer in held] == [True] * 4, "still where they were staged"
    assert json.loads(json.dumps(writer.write(1, staged).to_dict()))["num_bytes"] == num_bytes


def test_another_process_reads_the_same_bytes(writer):
    shared = writer.write(3, tensors())
    code = (
        "import sys, json; from rayrl.inference.shared_weights import *; "
        "print(open_weights(SharedWeights(**json.loads(sys.argv[1])))['a'].sum().item())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, json.dumps(shared.to_dict())],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert float(answer.stdout) == pytest.approx(tensors()["a"].sum().item(), rel=0, abs=1e-6)


def test_weights_are_refused_when_one_byte_differs(writer):
    shared = writer.write(3, tensors())
    with open(shared.file, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))

    with pytest.raises(TransferError, match="version 3 arrived with digest"):
        open_weights(shared)


def test_weights_are_refused_when_their_size_is_not_that_of_the_tensors(writer):
    shared = writer.write(3, tensors())

    with pytest.raises(TransferError, match="its tensors take"):
        open_weights(replace(shared, num_bytes=shared.num_bytes + 1))


def test_memory_is_gone_when_the_writer_is_closed():
    writer = SharedMemoryWriter()
    shared = writer.write(0, tensors())

    writer.close()
    writer.close()

    assert not os.path.exists(shared.file)


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 7), min_size=30, max_size=30),
    interval=st.integers(1, 9),
    late=st.booleans(),
)
def test_every_token_keeps_its_version_however_output_comes(versions, cuts, interval, late):
    builder = ChunkBuilder("r", interval, 9)
    starts = [
        (version, index) for index, version in enumerate(versions) if index == 0 or version != versions[index - 1]
    ]
    chunks, position = [], 0
    for cut in cuts:
        end = min(position + cut, len(versions))
        ends = end == len(versions)
        known = None if late and not ends else [start for start in starts if start[1] < end]
        part = range(position, end)
        chunks += builder.add(part, [-float(token) for token in part], known, "length" if ends else None)
        position = end
        if ends:
            break

    assert [token for chunk in chunks for token in chunk.tokens] == list(range(len(versions)))
    assert [chunk.version for chunk in chunks for _ in chunk.tokens] == versions
    assert all(chunk.logprobs == tuple(-float(token) for token in chunk.tokens) for chunk in chunks)
    assert all(0 < len(chunk.tokens) <= interval for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_request_without_tokens_ends_with_one_empty_chunk():
    (chunk,) = ChunkBuilder("r", 4, 9).add([], [], None, "abort")

    assert (chunk.tokens, chunk.version, chunk.finish_reason) == ((), 9, "abort")


def test_tokens_of_unknown_version_are_an_error_when_the_request_ends():
    with pytest.raises(EngineError, match="2 tokens of unknown version"):
        ChunkBuilder("r", 4, 9).add([1, 2], [-1.0, -1.0], None, "stop")


def test_unknown_finish_reason_is_an_error():
    with pytest.raises(EngineError, match="'repetition'"):
        ChunkBuilder("r", 4, 9).add([1], [-1.0], [(0, 0)], "repetition")


def test_last_lines_and_root_cause_of_a_child_are_kept():
    output = ChildOutput("the child")
    code = "import sys; print('before', file=sys.stderr); raise ValueError('no memory')"

    with output.captured():
        subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    output.wait_end(30)

    assert output.root_cause() == "ValueError: no memory"
    assert "last lines of the child" in output.tail() and "  | before" in output.tail()


def test_child_goes_on_when_its_output_cannot_be_passed_on():
    output = ChildOutput("the child")
    code = "import sys\nfor _ in range(40000): print('0123456789', file=sys.stderr)\nraise ValueError('no memory')"
    stderr, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    try:
        with output.captured():
            # More than a pipe holds: without a reader it would never end.
            subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(full)
    output.wait_end(30)

    assert output.root_cause() == "ValueError: no memory"
    assert "some were not passed on: [Errno 28]" in output.tail()


def test_line_without_an_end_is_kept_and_cut():
    output = ChildOutput("the child")

    with output.captured():
        subprocess.run([sys.executable, "-c", "print('.' * 1_000_000 + 'OutOfMemoryError', end='')"], check=True)
    output.wait_end(30)

    (line,) = output.tail().splitlines()[1:]
    assert line.endswith(".OutOfMemoryError") and len(line) < 100_000


def test_root_cause_is_found_when_the_child_writes_meanwhile():
    output = ChildOutput("the child")

    class Line(str):
        __slots__ = ()

        def split(self, *args):
            output._lines.append("more")
            return super().split(*args)

    output._lines.extend([Line("starting"), Line("ValueError: no memory")])

    assert output.root_cause() == "ValueError: no memory"


@pytest.mark.parametrize(
    ("version", "answer"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.31.9", False), ("0.33.0", False), ("1.0", False), ("dev", False)],
)
def test_version_of_vllm_is_supported_when_it_is_in_the_range(version, answer):
    assert supported(version) is answer
    assert supported_range() == ">=0.32,<0.33"
