"""Every byte of every tensor is in the buckets exactly once, whatever the sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.infra.buckets import ALIGNMENT, DTYPE_BYTES, TensorSpec, plan_buckets, stream_offsets

_SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
_SPECS = st.lists(st.tuples(_SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), max_size=12).map(
    lambda rows: [TensorSpec(name=f"t{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)]
)


@settings(max_examples=200, deadline=None)
@given(specs=_SPECS, bucket_bytes=st.integers(ALIGNMENT, 300))
def test_every_byte_is_in_one_bucket_once_for_any_specs_and_bucket_size(specs, bucket_bytes) -> None:
    seen = [[0] * spec.num_bytes for spec in specs]

    buckets = plan_buckets(specs, bucket_bytes)

    for bucket in buckets:
        assert 0 < bucket.num_bytes <= bucket_bytes
        end = 0
        for piece in bucket.slices:
            assert piece.num_bytes > 0 and end <= piece.bucket_offset
            end = piece.bucket_offset + piece.num_bytes
            for byte in range(piece.tensor_offset, piece.tensor_offset + piece.num_bytes):
                seen[piece.tensor_index][byte] += 1
        assert end <= bucket.num_bytes
    assert all(count == 1 for counts in seen for count in counts)


@settings(max_examples=200, deadline=None)
@given(specs=_SPECS, bucket_bytes=st.integers(ALIGNMENT, 300))
def test_buckets_are_consecutive_parts_of_the_stream_for_any_specs(specs, bucket_bytes) -> None:
    offsets, total = stream_offsets(specs)

    buckets = plan_buckets(specs, bucket_bytes)

    position = 0
    for bucket in buckets:
        assert bucket.start == position
        position += bucket.num_bytes
        for piece in bucket.slices:
            assert bucket.start + piece.bucket_offset == offsets[piece.tensor_index] + piece.tensor_offset
            assert piece.bucket_offset % ALIGNMENT == 0
    assert position == total
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_a_tensor_is_split_when_it_is_larger_than_a_bucket() -> None:
    buckets = plan_buckets([TensorSpec(name="w", shape=(100,), dtype="float32")], 192)

    assert [bucket.num_bytes for bucket in buckets] == [192, 192, 16]
    assert [bucket.slices[0].tensor_offset for bucket in buckets] == [0, 192, 384]


def test_small_tensors_share_a_bucket_when_they_fit() -> None:
    specs = [TensorSpec(name=name, shape=(3,), dtype="bfloat16") for name in ("a", "b", "c")]

    (bucket,) = plan_buckets(specs, 1024)

    assert [piece.bucket_offset for piece in bucket.slices] == [0, 64, 128]
    assert bucket.num_bytes == 134


def test_there_is_no_bucket_when_there_are_no_bytes() -> None:
    assert plan_buckets([TensorSpec(name="empty", shape=(0, 4), dtype="float32")], 1024) == ()


def test_bucket_size_is_refused_when_it_is_below_the_alignment() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=8 is below 64"):
        plan_buckets([TensorSpec(name="w", shape=(1,), dtype="int8")], 8)


def test_spec_names_the_allowed_types_when_the_type_is_unknown() -> None:
    with pytest.raises(ValueError, match=r"'quint8'.*bfloat16"):
        TensorSpec(name="w", shape=(1,), dtype="quint8")
