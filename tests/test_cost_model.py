"""What an all-reduce costs."""

import pytest

from lightning_dp.insight.cost_model import ring_all_reduce_bytes

ITEM = 8  # bytes of an element


def ring_all_reduce(buffers: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """A ring all-reduce, chunk by chunk: what each rank holds at the end, and the bytes that each has sent."""
    n, numel = len(buffers), len(buffers[0])
    buffers = [list(buffer) for buffer in buffers]
    cuts = [numel * chunk // n for chunk in range(n + 1)]
    sent = [0] * n
    for reduce in (True, False):  # reduce-scatter, then all-gather
        for turn in range(n - 1):
            letters = []
            for rank in range(n):
                chunk = (rank - turn + (not reduce)) % n
                span = range(cuts[chunk], cuts[chunk + 1])
                letters.append(((rank + 1) % n, span, [buffers[rank][i] for i in span]))
                sent[rank] += ITEM * len(span)
            for receiver, span, values in letters:
                for i, value in zip(span, values, strict=True):
                    buffers[receiver][i] = buffers[receiver][i] + value if reduce else value
    return buffers, sent


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("per_chunk", [1, 7])
def test_a_ring_sends_what_the_formula_says(n, per_chunk):
    numel = n * per_chunk
    buffers = [[(rank + 1) * 1000 + i for i in range(numel)] for rank in range(n)]
    reduced, sent = ring_all_reduce(buffers)
    assert reduced == [[sum(column) for column in zip(*buffers, strict=True)]] * n  # it is an all-reduce
    assert sent == [ring_all_reduce_bytes(ITEM * numel, n)] * n


@pytest.mark.parametrize(("n", "numel"), [(2, 7), (3, 10), (4, 1), (5, 3), (8, 61)])
def test_where_chunks_are_uneven_the_formula_is_the_mean_over_ranks(n, numel):
    buffers = [[rank * 100 + i for i in range(numel)] for rank in range(n)]
    reduced, sent = ring_all_reduce(buffers)
    assert reduced == [[sum(column) for column in zip(*buffers, strict=True)]] * n
    assert sum(sent) / n == pytest.approx(ring_all_reduce_bytes(ITEM * numel, n), rel=1e-12)


@pytest.mark.parametrize(
    ("payload", "n", "expected"),
    [(100, 1, 0), (0, 8, 0), (100, 2, 100), (100, 4, 150), (1.5, 3, 2.0), (1024, 1024, 2046)],
)
def test_known_values(payload, n, expected):
    assert ring_all_reduce_bytes(payload, n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("payload", "n", "message"),
    [
        (1, 0, "world_size must be at least 1, got 0"),
        (1, -2, "got -2"),
        (-1, 2, "payload must not be negative, got -1"),
    ],
)
def test_impossible_arguments_are_refused(payload, n, message):
    with pytest.raises(ValueError, match=message):
        ring_all_reduce_bytes(payload, n)
